"""Patches of vLLM that can be tried without it."""

from types import SimpleNamespace

import pytest
import torch

from hone.workers.inside.vllm_patches import add_bias_to_choice


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
    for other in ({"use_grouped_topk": True}, {"e_score_correction_bias": None}, {"scoring_func": "sqrtsoftplus"}):
        assert route(SimpleNamespace(**{**vars(router), **other}), None, logits, None) == "vLLM's own"
