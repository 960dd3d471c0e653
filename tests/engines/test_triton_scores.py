"""The Triton kernels of the head: the same numbers and gradients as torch's operations, chunk by chunk.

They run compiled on a GPU, or in Triton's interpreter on a CPU (`make test-triton`).
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hone.engines.logprobs import WHOLE, Head, Queries, Reference, score_tokens
from hone.platforms.base import current_platform, why_no_triton

PLATFORM = current_platform()
WHY_NOT = why_no_triton(PLATFORM)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"{WHY_NOT} (make test-triton)"),
]
ROOT = Path(__file__).resolve().parents[2]
kernels = None if WHY_NOT else importlib.import_module("hone.engines.kernels.triton_scores")
DEVICE = str(PLATFORM.torch_device())
ROWS, WIDTH, VOCABULARY = 11, 6, 4096 + 77  # a whole block of the kernel, and a part of one
NEEDS = frozenset({"entropy", "sum_pi_squared"})
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of gradients, which have that dtype


def head_of(dtype, bias=False, width=WIDTH, vocabulary=VOCABULARY, **kind):
    def weight(*shape):
        return torch.randn(*shape).to(DEVICE, dtype).requires_grad_()

    return Head(weight(vocabulary, width), weight(vocabulary) if bias else None, **kind)


def rows_for(head, rows=ROWS):
    hidden = torch.randn(rows, head.weight.shape[1]).to(DEVICE, head.weight.dtype).requires_grad_()
    return hidden, torch.randint(0, len(head.weight), (rows,)).to(DEVICE)


def fused(scores):
    return scores.logprobs.grad_fn.plan.fused is not None


def by_torch(hidden, targets, head, **settings):
    scores = score_tokens(hidden, targets, head, **settings, queries=Queries())
    assert not fused(scores)
    return scores


def by_triton(hidden, targets, head, **settings):
    scores = score_tokens(hidden, targets, head, **settings)
    assert fused(scores)
    return scores


def gradients(total, hidden, head):
    inputs = [hidden, head.weight] + ([head.bias] if head.bias is not None else [])
    return torch.autograd.grad(total, inputs)


def assert_close(one, other, tolerance):
    assert one.dtype == other.dtype
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "kind",
    [{}, {"bias": True}, {"softcap": 2.0}, {"scale": 0.25}, {"bias": True, "softcap": 3.0, "scale": 2.0}],
    ids=str,
)
def test_values_and_gradients_equal_those_of_torch(kind, dtype):
    head = head_of(dtype, **kind)
    hidden, targets = rows_for(head)
    settings = {"temperature": 0.7, "chunk_tokens": 4, "needs": NEEDS}
    ours, theirs = by_triton(hidden, targets, head, **settings), by_torch(hidden, targets, head, **settings)
    for name in ("logprobs", "entropy", "sum_pi_squared"):
        assert getattr(ours, name).dtype == torch.float32
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)
    a, b = torch.randn(2, ROWS, device=DEVICE)
    for total in (lambda s: (s.logprobs * a + s.entropy * b).sum(), lambda s: (s.entropy * b).sum()):
        mine, others = (
            gradients(total(one(hidden, targets, head, **settings)), hidden, head) for one in (by_triton, by_torch)
        )
        for one, other in zip(mine, others, strict=True):
            assert_close(one, other, TOLERANCE[dtype])


def test_only_what_is_asked_for_is_returned_and_differentiated():
    head = head_of(torch.float32)
    hidden, targets = rows_for(head)
    ours = by_triton(hidden, targets, head)
    assert (ours.entropy, ours.sum_pi_squared) == (None, None)
    mine = gradients(ours.logprobs.sum(), hidden, head)
    for one, other in zip(mine, gradients(by_torch(hidden, targets, head).logprobs.sum(), hidden, head), strict=True):
        assert_close(one, other, 2e-5)


def test_two_tokens_by_hand():
    # Logits (0, ln 3): probabilities 1/4 and 3/4; at temperature 1/2, (0, 2 ln 3): 1/10 and 9/10.
    head = Head(torch.tensor([[0.0], [1.0986123]], device=DEVICE).requires_grad_())
    hidden, targets = torch.ones(2, 1, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    at_one = by_triton(hidden, targets, head, needs=NEEDS)
    close = torch.testing.assert_close
    close(at_one.logprobs.exp().tolist(), [0.25, 0.75], rtol=1e-6, atol=1e-6)
    close(at_one.entropy.tolist(), [0.5623351, 0.5623351], rtol=1e-6, atol=1e-6)
    close(at_one.sum_pi_squared.tolist(), [0.625, 0.625], rtol=1e-6, atol=1e-6)
    at_half = by_triton(hidden, targets, head, temperature=0.5)
    close(at_half.logprobs.exp().tolist(), [0.1, 0.9], rtol=1e-6, atol=1e-6)
    # d log-prob of token 0 / d logits = (1 - 1/4, -3/4) at temperature 1, twice (0.9, -0.9) at 1/2.
    (grad,) = torch.autograd.grad(at_one.logprobs[0], head.weight)
    close(grad[:, 0].tolist(), [0.75, -0.75], rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(at_half.logprobs[0], head.weight)
    close(grad[:, 0].tolist(), [1.8, -1.8], rtol=1e-6, atol=1e-6)


def test_gradients_equal_finite_differences():
    head = head_of(torch.float32, bias=True, width=3, vocabulary=5, softcap=3.0, scale=1.5)
    hidden, targets = rows_for(head, 4)
    weights = torch.randn(2, 4, device=DEVICE)
    ours = by_triton(hidden, targets, head, temperature=0.8, needs=NEEDS)
    mine = gradients((ours.logprobs * weights[0] + ours.entropy * weights[1]).sum(), hidden, head)

    def loss(hidden, weight, bias):  # in float64 on the CPU, which torch's operations compute in
        wide = replace(head, weight=weight, bias=bias)
        found = score_tokens(hidden, targets.cpu(), wide, temperature=0.8, needs=NEEDS)
        return float((found.logprobs * weights[0].cpu() + found.entropy * weights[1].cpu()).sum())

    values = [one.detach().cpu().double() for one in (hidden, head.weight, head.bias)]
    for value, grad in zip(values, mine, strict=True):
        for at in range(value.numel()):
            start, ends = value.flatten()[at].item(), []
            for step in (1e-5, -1e-5):
                value.view(-1)[at] = start + step
                ends.append(loss(*values))
            value.view(-1)[at] = start
            assert grad.flatten()[at].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_logits_give_no_nan(dtype):
    """Logits of +-10^4, tokens that a bias of -inf rules out, and blocks of nothing but -inf."""
    logits = torch.zeros(6, VOCABULARY)
    logits[0, 3], logits[1, :] = 1e4, -1e4
    logits[2, :4100] = float("-inf")  # the whole first block
    logits[3, 100:] = float("-inf")
    logits[4, 5:] = float("-inf")
    logits[4, :5] = torch.tensor([1e4, 1e4, -1e4, 0, 9990.0])
    logits[5, ::2], logits[5, 1::2] = 1e4, -1e4
    targets = torch.tensor([3, 7, 4150, 9, 4, 1], device=DEVICE)
    hidden, weight = (torch.zeros(rows, 1, device=DEVICE, dtype=dtype) for rows in (1, VOCABULARY))
    for row, target in zip(logits.to(dtype), targets, strict=True):
        bias = row.to(DEVICE, copy=True).requires_grad_()
        scores = by_triton(hidden, target[None], Head(weight, bias), needs=NEEDS)
        log_pi = row.double().log_softmax(-1)
        pi = log_pi.exp()
        surprise = torch.where(pi > 0, log_pi, 0.0)
        entropy = -(pi * surprise).sum()
        found = [one.item() for one in (scores.logprobs, scores.entropy, scores.sum_pi_squared)]
        assert found == pytest.approx(
            [float(log_pi[target]), float(entropy), float((pi * pi).sum())], rel=1e-5, abs=1e-5
        )
        (grad,) = torch.autograd.grad(scores.logprobs.sum() + scores.entropy.sum(), bias)
        exact = -pi * (1 + surprise + entropy)
        exact[target] += 1
        torch.testing.assert_close(grad.cpu().double(), exact, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    head = head_of(torch.float32)
    hidden, targets = rows_for(head)
    scores = by_triton(hidden[:rows], targets[:rows], head, needs=NEEDS)
    assert scores.logprobs.shape == scores.entropy.shape == scores.sum_pi_squared.shape == (rows,)
    of_hidden, of_weight = gradients((scores.logprobs + scores.entropy).sum(), hidden, head)
    assert of_hidden.any(1).sum() == rows
    assert bool(of_weight.any()) is bool(rows)


def test_a_row_does_not_depend_on_other_rows_and_repeats_to_the_bit():
    kernel = kernels.Fused.of(1.0, None, 0.9)
    products, grads = 5 * torch.randn(7, VOCABULARY, device=DEVICE), torch.randn(7, 2, device=DEVICE)
    targets = torch.randint(0, VOCABULARY, (7,), device=DEVICE)
    found = kernel.score(products, targets)[-1]
    whole = kernel.gradient(products.clone(), targets, found, *grads.unbind(1))
    for part in (slice(0, 7), slice(2, 3), slice(4, 7)):
        some = products[part].clone()
        assert torch.equal(kernel.score(some, targets[part])[-1], found[part])
        again = kernel.gradient(some, targets[part], found[part], *grads[part].unbind(1))
        assert torch.equal(again, whole[part])
        assert again.data_ptr() == some.data_ptr()  # in place


def test_a_target_outside_of_the_vocabulary_is_nan():
    head = head_of(torch.float32)
    hidden, targets = rows_for(head, 3)
    targets[0], targets[1] = -100, VOCABULARY
    assert by_triton(hidden, targets, head).logprobs.isnan().tolist() == [True, True, False]


class AnotherVocabulary:
    """Not `WholeVocabulary`, and the same answers."""

    def __getattr__(self, name):
        return getattr(WHOLE, name)


def test_what_the_kernels_do_not_compute_is_left_to_torch():
    head = head_of(torch.float32)
    hidden, targets = rows_for(head)
    assert fused(score_tokens(hidden, targets, head))
    assert not fused(score_tokens(hidden, targets, head, queries=Queries(token_ids=targets[:, None])))
    assert not fused(score_tokens(hidden, targets, head, queries=Queries(top_k=2)))
    assert not fused(score_tokens(hidden, targets, head, queries=Queries(reference=Reference(hidden.detach(), head))))
    assert not fused(score_tokens(hidden, targets, replace(head, vocabulary=AnotherVocabulary())))
    assert not fused(score_tokens(hidden, targets, replace(head, dtype=torch.float64)))
    assert fused(score_tokens(hidden, targets, replace(head_of(torch.bfloat16), dtype=torch.float32)))


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch):
    kernels.check(DEVICE)
    monkeypatch.setattr(kernels.Fused, "gradient", lambda self, products, *others: products)
    with pytest.raises(RuntimeError, match=r"differs from torch's operations on .* variable HONE_TRITON=0"):
        kernels.check(DEVICE)


@pytest.mark.skipif(DEVICE != "cpu", reason="the engine of this test computes on a CPU")
def test_an_engine_trains_alike_with_both(make_engine, make_batch, losses, monkeypatch):
    results = {}
    for switch in ("1", "0"):
        monkeypatch.setenv("HONE_TRITON", switch)
        engine, batch = make_engine(temperature=0.8), make_batch()
        (spread,) = (one for one, _ in engine.forward(batch, frozenset()).logprobs.grad_fn.next_functions if one)
        assert (spread.plan.fused is None) is (switch == "0")
        metrics = [engine.train_batch(batch, losses.entropy) for _ in range(2)]
        results[switch] = [value.value for step in metrics for value in step.values()]
    assert results["1"] == pytest.approx(results["0"], rel=1e-4)


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    """For NVIDIA's 8.0 and 9.0 and AMD's gfx942, in all dtypes: a compiler needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "HONE_PLATFORM": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "tests.engines.compile_triton_scores"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 3 * 2 * 3 * 2
    assert [one for one in compiled if not one["bytes"]] == []
