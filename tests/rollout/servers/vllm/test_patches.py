"""Patches of vLLM that can be tried without it."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch

from hone.workers.inside.vllm_patches import (
    add_bias_to_choice,
    copy_convolutions,
    give_layers_their_embeddings,
    lay_out_single_tokens,
    name_loaders,
    rotate_by_token,
)


def untouched(*given, **named):
    return "vLLM's own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_chooses_experts_and_is_in_no_weight(dtype):
    """Softmax scores 0.5, 0.3 and 0.2; the bias lifts the last one over the second."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().to(dtype)
    router = SimpleNamespace(
        scoring_func="softmax",
        use_grouped_topk=False,
        custom_routing_function=None,
        e_score_correction_bias=torch.tensor([0.0, 0.0, 0.2]),
        top_k=2,
        renormalize=True,
        routed_scaling_factor=1.0,
    )
    route = add_bias_to_choice(untouched)
    weights, experts = route(router, None, logits, None, input_ids=None)
    assert (experts.tolist(), experts.dtype, weights.dtype) == ([[0, 2]], torch.int32, torch.float32)
    assert weights[0].tolist() == pytest.approx([5 / 7, 2 / 7], abs=3e-3)
    router.renormalize, router.routed_scaling_factor = False, 2.0
    assert route(router, None, logits, None)[0][0].tolist() == pytest.approx([1.0, 0.4], abs=6e-3)
    router.scoring_func = "sigmoid"  # 1/3, 0.23 and 1/6; weights are doubled
    assert route(router, None, logits, None)[1].tolist() == [[2, 0]]
    assert route(router, None, logits, None)[0][0].tolist() == pytest.approx([1 / 3, 2 / 3], abs=6e-3)
    router.e_score_correction_bias = None
    assert route(router, None, logits, None)[1].tolist() == [[0, 1]]
    router.scoring_func = "softmax"
    for other in ({"use_grouped_topk": True}, {}, {"scoring_func": "sqrtsoftplus"}):
        assert route(SimpleNamespace(**{**vars(router), **other}), None, logits, None) == "vLLM's own"


def test_heads_in_a_dimension_of_their_own_are_turned_as_one_token():
    seen = []
    rotate = rotate_by_token(lambda positions, query, key, size: seen.append((query, key, size)))
    queries, keys = torch.zeros(3, 4, 8), torch.zeros(3, 16)
    rotate(torch.arange(3), queries, keys, 8)
    rotate(torch.arange(3), keys, None, 8)
    (query, key, size), (_, none, _) = seen
    assert (query.shape, key is keys, size, none) == ((3, 32), True, 8, None)
    assert query.data_ptr() == queries.data_ptr()  # the kernel turns them in place
    wide = torch.zeros(3, 4, 10)
    rotate_by_token(lambda positions, query, key: query.add_(1))(torch.arange(3), wide[..., :8], None)
    assert (int(wide[..., :8].sum()), int(wide[..., 8:].sum())) == (96, 0)


def test_layers_read_the_convolution_that_an_update_packed():
    """Only one of the two layers has packed weights; a parent of a layer has none of both."""
    packed, plain = torch.nn.Module(), torch.nn.Module()
    for layer in (packed, plain):
        layer.conv1d = torch.nn.Module()
        layer.register_buffer("conv_weights", torch.zeros(2, 4))
    packed.conv1d._cpu_unpacked_conv_weight = torch.arange(8.0).view(2, 4)
    memory = packed.conv_weights.data_ptr()
    copy_convolutions(torch.nn.ModuleList([packed, plain]))
    assert packed.conv_weights.flatten().tolist() == list(range(8))
    assert packed.conv_weights.data_ptr() == memory
    assert not plain.conv_weights.any()


def test_a_single_token_of_a_wider_row_is_laid_out_as_a_kernel_wants_it():
    seen = []
    convolve = lay_out_single_tokens(lambda x, weight: seen.append((x, weight)))
    rows = torch.arange(12.0).view(2, 6)
    convolve(x=rows[:1, :4].t(), weight="packed")
    convolve(x=rows.t(), weight="packed")
    (one, weight), (several, _) = seen
    assert (one.stride(), one.flatten().tolist(), weight) == ((1, 4), [0, 1, 2, 3], "packed")
    assert several.data_ptr() == rows.data_ptr()


def test_each_layer_of_a_text_only_gemma_3n_gets_its_embeddings():
    class Gemma3nForCausalLM:
        config = SimpleNamespace(num_hidden_layers=2, hidden_size_per_layer_input=3)
        model = SimpleNamespace(get_per_layer_input_embeddings=lambda ids: ids[:, None] * torch.ones(1, 6))

        def forward(self, input_ids, positions, *, per_layer_inputs=None, **named):
            return per_layer_inputs, named

    model = Gemma3nForCausalLM()
    give_layers_their_embeddings(model)
    found, named = model.forward(input_ids=torch.tensor([5, 7]), positions=torch.arange(2), inputs_embeds=None)
    assert (found.tolist(), named) == ([[[5.0] * 3] * 2, [[7.0] * 3] * 2], {"inputs_embeds": None})
    other = SimpleNamespace(forward=untouched)
    give_layers_their_embeddings(other)
    assert other.forward is untouched


def test_loaders_that_are_partial_functions_get_a_name():
    layer = torch.nn.Linear(2, 2)

    def load(weight, loaded, part=None):
        return part

    layer.weight.weight_loader = functools.partial(load, part=1)
    name_loaders(layer)
    bound = inspect.signature(layer.weight.weight_loader).bind(layer.weight, None)  # as the reload calls it
    bound.apply_defaults()
    assert (layer.weight.weight_loader.__name__, layer.weight.weight_loader(*bound.args, **bound.kwargs)) == ("load", 1)
