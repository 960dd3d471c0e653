"""Chunked log-probs: the same numbers and gradients as the plain computation over all logits."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hone.engines.logprobs import Head, score_tokens

ROWS, WIDTH, VOCABULARY = 23, 6, 130


def plain(hidden, targets, head, temperature):
    """What `score_tokens` has to equal: all logits at once, by autograd."""
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_pi = torch.log_softmax(logits / temperature, -1)
    pi = log_pi.exp()
    return log_pi.gather(1, targets[:, None])[:, 0], -(pi * log_pi).sum(-1), (pi * pi).sum(-1)


def head_of(dtype, bias=False, **kind):
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    return Head(weight, torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if bias else None, **kind)


@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
@pytest.mark.parametrize(
    "kind",
    [{}, {"bias": True}, {"softcap": 2.0}, {"scale": 0.25}, {"bias": True, "softcap": 3.0, "scale": 2.0}],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_the_plain_computation(chunk, kind, dtype, tolerance):
    head = head_of(dtype, **kind)
    hidden = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    a, b = torch.randn(ROWS, dtype=dtype), torch.randn(ROWS, dtype=dtype)
    inputs = [hidden, head.weight] + ([head.bias] if head.bias is not None else [])
    needs = frozenset({"entropy", "sum_pi_squared"})
    ours = score_tokens(hidden, targets, head, temperature=0.7, chunk_tokens=chunk, needs=needs)
    logprobs, entropy, squared = plain(hidden, targets, head, 0.7)
    for one, other in ((ours.logprobs, logprobs), (ours.entropy, entropy), (ours.sum_pi_squared, squared)):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for ours_total, total in (
        ((ours.logprobs * a + ours.entropy * b).sum(), (logprobs * a + entropy * b).sum()),
        ((ours.entropy * b).sum(), (entropy * b).sum()),
        ((ours.logprobs * a).sum(), (logprobs * a).sum()),
    ):
        mine = torch.autograd.grad(ours_total, inputs, retain_graph=True)
        theirs = torch.autograd.grad(total, inputs, retain_graph=True)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)], ids=str)
def test_a_head_on_a_device_equals_the_plain_computation_in_float64(dtype, near, each_device):
    """Values and gradients; on GPUs, Triton's kernels compute them."""
    hidden, weight = torch.randn(ROWS, 64), torch.randn(VOCABULARY, 64) / 8
    targets, upstream = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(2, ROWS)
    inputs = [one.to(each_device, dtype).requires_grad_() for one in (hidden, weight)]
    wide = [one.detach().cpu().double().requires_grad_() for one in inputs]
    needs, there = frozenset({"entropy"}), targets.to(each_device)
    ours = score_tokens(inputs[0], there, Head(inputs[1]), temperature=0.7, chunk_tokens=7, needs=needs)
    logprobs, entropy, _ = plain(wide[0], targets, Head(wide[1]), 0.7)
    found, exact = [ours.logprobs, ours.entropy], [logprobs, entropy]
    for results, tensors in ((found, inputs), (exact, wide)):
        total = sum((one * up.to(one.device)).sum() for one, up in zip(tuple(results), upstream, strict=True))
        results += torch.autograd.grad(total, tensors)
    for one, other in zip(found, exact, strict=True):
        assert one.device.type == each_device
        assert (one.double().cpu() - other).norm() < near * other.norm()


def test_two_tokens_by_hand():
    # Logits (0, ln 3): probabilities 1/4 and 3/4; at temperature 1/2, (0, 2 ln 3): 1/10 and 9/10.
    head = Head(torch.tensor([[0.0], [1.0986123]]))
    hidden, targets = torch.ones(2, 1), torch.tensor([0, 1])
    needs = frozenset({"entropy", "sum_pi_squared"})
    at_one = score_tokens(hidden, targets, head, needs=needs)
    torch.testing.assert_close(at_one.logprobs.exp(), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(at_one.entropy, torch.full((2,), 0.5623351))
    torch.testing.assert_close(at_one.sum_pi_squared, torch.full((2,), 0.625))
    at_half = score_tokens(hidden, targets, head, temperature=0.5)
    torch.testing.assert_close(at_half.logprobs.exp(), torch.tensor([0.1, 0.9]))
    assert at_half.entropy is None
    assert at_half.sum_pi_squared is None


class WidestLogits(TorchDispatchMode):
    """Notes the most rows of any tensor that is as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == VOCABULARY:
            self.rows = max(self.rows, out.shape[0])
        return out


def test_no_more_than_one_chunk_of_logits_exists():
    head = head_of(torch.float32)
    hidden = torch.randn(500, WIDTH, requires_grad=True)
    with WidestLogits() as seen:
        scores = score_tokens(hidden, torch.zeros(500, dtype=torch.int64), head, chunk_tokens=10)
        (scores.logprobs.sum()).backward()
    assert 0 < seen.rows <= 10


def test_a_frozen_head_gets_no_gradient_and_no_rows_give_none():
    head = Head(torch.randn(VOCABULARY, WIDTH))
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    score_tokens(hidden, torch.tensor([1, 2, 3]), head).logprobs.sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.abs().sum() > 0
    assert score_tokens(hidden[:0], torch.tensor([], dtype=torch.int64), head).logprobs.shape == (0,)


def test_bfloat16_logits_are_scored_in_float32():
    head = Head(torch.randn(VOCABULARY, WIDTH).bfloat16())
    hidden, targets = torch.randn(ROWS, WIDTH).bfloat16(), torch.randint(0, VOCABULARY, (ROWS,))
    logits = (hidden @ head.weight.T).float()
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    scores = score_tokens(hidden, targets, head)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, expected)


SIZES = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("name", "own", "scale", "softcap"),
    [
        ("Gemma2Config", {"final_logit_softcapping": 30.0}, 1.0, 30.0),
        ("CohereConfig", {"logit_scale": 0.25, "bos_token_id": 1, "eos_token_id": 2}, 0.25, None),
        ("GraniteConfig", {"logits_scaling": 8.0}, 0.125, None),
        ("Qwen3Config", {}, 1.0, None),
    ],
)
def test_the_head_of_an_architecture(name, own, scale, softcap):
    config = getattr(transformers, name)(**SIZES, **own, num_attention_heads=2, num_key_value_heads=2)
    head = Head.of(AutoModelForCausalLM.from_config(config))
    assert (head.scale, head.softcap) == (scale, softcap)
    assert head.weight.shape == (64, 8)
