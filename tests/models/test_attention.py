"""Packed attention: a packed row gives what each of its sequences gives alone, for every architecture."""

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hone.models.attention.packed import (
    PACKED,
    AttentionWindow,
    Packing,
    Scoring,
    attend,
    packed,
    packed_attention_forward,
    packed_mask,
)

LENGTHS = (5, 9, 9, 1, 12)
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "qwen3": ("Qwen3Config", SIZES),
    "llama": ("LlamaConfig", SIZES),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | EXPERTS),
    "qwen2": ("Qwen2Config", SIZES),
    "mistral_window": ("MistralConfig", SIZES | {"sliding_window": 4}),
    "gemma2_softcap": ("Gemma2Config", SIZES | {"sliding_window": 4, "attn_logit_softcapping": 0.5}),
    "gemma3_window": (
        "Gemma3TextConfig",
        SIZES | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3Config", SIZES),
    "olmo2": ("Olmo2Config", SIZES),
    "gpt_oss_sinks": (
        "GptOssConfig",
        SIZES
        | {"num_local_experts": 4, "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gpt2": ("GPT2Config", GPT2),
}


def starts(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_row_equals_its_sequences_one_at_a_time(name):
    config_class, sizes = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the default is so small that attention hardly shows in the logits
            parameter.normal_(0, 0.2)
        tokens = [torch.randint(3, 100, (length,)) for length in LENGTHS]
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        with packed(starts(LENGTHS)):
            together = model(torch.cat(tokens)[None], position_ids=positions[None], use_cache=False).logits[0]
        model.set_attn_implementation("eager")  # transformers' own, written out
        alone = torch.cat([model(one[None], use_cache=False).logits[0] for one in tokens])
    assert together.std() > 0.1
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


def packed_sdpa(q, k, v, cu_seqlens, scale=None, window=None):
    return attend(q, k, v, Packing.of(cu_seqlens), Scoring(scale or q.shape[-1] ** -0.5, window))


def reference(q, k, v, lengths, scale, window=None):
    """Attention of each sequence written out, in the layout of `packed_sdpa`."""
    outputs, start = [], 0
    groups = q.shape[1] // k.shape[1]
    for length in lengths:
        part = slice(start, start + length)
        start += length
        qs, ks, vs = (
            q[0, :, part],
            k[0, :, part].repeat_interleave(groups, 0),
            v[0, :, part].repeat_interleave(groups, 0),
        )
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        seen = (j <= i) & (j > i - (window or length))
        outputs.append(((qs @ ks.mT) * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ vs)
    return torch.cat(outputs, 1)[None]


def row(heads, tokens, size, dtype):
    """[1, heads, tokens, size] as transformers lays it out in memory: a transposed view."""
    return torch.randn(1, tokens, heads, size, dtype=dtype).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("lengths", [(7,), (4, 4, 4), (3, 8, 8, 1)])
@pytest.mark.parametrize("window", [None, 3])
def test_values_and_gradients_equal_attention_written_out(lengths, window):
    total = sum(lengths)
    q, k, v = row(4, total, 8, torch.float64), row(2, total, 8, torch.float64), row(2, total, 6, torch.float64)
    upstream = torch.randn(1, 4, total, 6, dtype=torch.float64)
    results = []
    for function, where in ((packed_sdpa, starts(lengths)), (reference, lengths)):
        out = function(q, k, v, where, 0.3, window)
        results.append((out, *torch.autograd.grad((out * upstream).sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [(40, 40), (3, 70, 1, 150)])
def test_bfloat16_is_as_close_as_bfloat16_allows(lengths):
    total = sum(lengths)
    q, k, v = row(4, total, 16, torch.bfloat16), row(2, total, 16, torch.bfloat16), row(2, total, 16, torch.bfloat16)
    upstream = torch.randn(1, 4, total, 16, dtype=torch.bfloat16)
    out = packed_sdpa(q, k, v, starts(lengths))
    ours = (out, *torch.autograd.grad((out * upstream).sum(), (q, k, v)))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = reference(*wide, lengths, 16**-0.5)
    theirs = (exact, *torch.autograd.grad((exact * upstream.double()).sum(), wide))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 0.01 * other.norm()


def test_dropout_and_sinks_reach_the_weights():
    q, k, v = (row(1, 64, 4, torch.float32) for _ in range(3))
    packing = Packing.of(torch.tensor([0, 64]))
    plain = attend(q, k, v, packing, Scoring(scale=0.5))
    assert not torch.equal(attend(q, k, v, packing, Scoring(scale=0.5, dropout=0.5)), plain)
    # A sink of score 0 beside a single key of score 0 takes half of its weight.
    one = torch.ones(1, 1, 1, 4)
    halved = attend(one * 0, one * 0, one, Packing.of(torch.tensor([0, 1])), Scoring(scale=1.0, sinks=torch.zeros(1)))
    assert torch.equal(halved, one / 2)


def test_neighbours_of_equal_length_share_a_kernel_call():
    runs = Packing.of(torch.tensor([0, 4, 8, 12, 15, 19])).runs
    assert [(run.count, run.length, run.prefix) for run in runs] == [(3, 4, 0), (1, 3, 0), (1, 4, 0)]
    runs = Packing.of(torch.tensor([0, 4, 8, 12, 14, 16, 19]), [None, None, None, 0, 2, 1]).runs
    assert [(run.count, run.length, run.prefix) for run in runs] == [(3, 4, 0), (2, 2, 4), (1, 3, 4)]
    assert [run.rows.tolist() for run in runs[1:]] == [[0, 2], [1]]
    with pytest.raises(ValueError, match="segment 1 has prefix 2, which should come before it"):
        Packing.of(torch.tensor([0, 4, 8, 12]), [None, 2, None])


@pytest.mark.parametrize("bad", [[0], [1, 3], [0, 3, 3], [0, 5, 2]])
def test_boundaries_that_mark_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="cu_seqlens should start at 0 and increase"):
        Packing.of(torch.tensor(bad))


def test_what_packed_attention_cannot_do_is_refused():
    module = torch.nn.Identity()
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="inside `with packed"):
        packed_attention_forward(module, q, q, q, None)
    with packed(torch.tensor([0, 4])):
        with pytest.raises(NotImplementedError, match="asks for \\['position_bias'\\]"):
            packed_attention_forward(module, q, q, q, None, position_bias=q)
        with pytest.raises(NotImplementedError, match="not causal"):
            packed_attention_forward(module, q, q, q, None, is_causal=False)
        with pytest.raises(NotImplementedError, match="no mask tensor"):
            packed_attention_forward(module, q, q, q, torch.zeros(1, 1, 4, 4))
        with pytest.raises(ValueError, match="window of 2 tokens is not the layer's of 3"):
            packed_attention_forward(module, q, q, q, AttentionWindow(2), sliding_window=3)
        with pytest.raises(ValueError, match="one row of 4 tokens"):
            packed_attention_forward(module, q[:, :, :3], q, q, None)
    with pytest.raises(NotImplementedError, match="padding mask"):
        packed_mask(4, 4, attention_mask=torch.ones(1, 4))
    with pytest.raises(NotImplementedError, match="KV cache"):
        packed_mask(1, 4)
    with pytest.raises(NotImplementedError, match="own attention mask"):
        packed_mask(4, 4, use_vmap=True)
    chunked = transformers.Llama4TextConfig(attention_chunk_size=16)
    assert packed_mask(4, 4, local_size=16, config=chunked) == AttentionWindow(16, chunks=True)
    assert packed_mask(4, 4) is None
    assert packed_mask(4, 4, local_size=2) == AttentionWindow(2)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize("window", [None, 16])
def test_a_packed_row_on_a_device_equals_attention_in_float64(window, dtype, near, each_device):
    """Values and gradients; on GPUs, FlashAttention computes bfloat16."""
    lengths = (33, 64, 64, 5)
    q, k, v = (row(h, sum(lengths), 64, dtype).detach().to(each_device).requires_grad_() for h in (4, 2, 2))
    out = packed_sdpa(q, k, v, starts(lengths).to(each_device), window=window)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    wide = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    exact = reference(*wide, lengths, 64**-0.5, window)
    expected = torch.autograd.grad(exact.square().sum(), wide)
    for one, other in zip((out, *grads), (exact, *expected), strict=True):
        assert (one.double().cpu() - other).norm() < near * other.norm()
