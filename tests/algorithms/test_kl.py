"""KL estimators: literal values and gradients, and agreement with the exact KL."""

import math

import pytest
import torch

from hone.algorithms.kl import adapt_coef, full_kl, kl_penalty


def at(kind, lp, ref):
    lp = torch.tensor([lp], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(lp, torch.tensor([ref], dtype=torch.float64), kind)
    (gradient,) = torch.autograd.grad(value.sum(), lp)
    return value.item(), gradient.item()


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", -0.5, 1.0),
        ("abs", 0.5, -1.0),
        ("k2", 0.125, -0.5),
        ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k1+", -0.5, -0.5),
        ("abs+", 0.5, -0.5),
        ("k2+", 0.125, -0.5),
        ("k3+", math.exp(0.5) - 1.5, -0.5),
    ],
)
def test_value_and_gradient(kind, value, gradient):
    assert at(kind, lp=-1.5, ref=-1.0) == pytest.approx((value, gradient))


def test_k3_clamps_the_log_ratio_before_exp():
    value, gradient = at("k3", lp=-50.0, ref=-1.0)
    assert value == pytest.approx(math.exp(20.0) - 21)
    assert gradient == 0


def test_full_from_log_probs_is_refused():
    with pytest.raises(ValueError, match="full"):
        at("full", 0.0, 0.0)


def test_full_kl_is_exact_whatever_the_chunk(close):
    logits = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 1.0]]).double().log()
    ref = torch.tensor([[0.5, 0.5], [0.5, 0.5], [1.0, 3.0]]).double().log()
    expected = [
        0.25 * math.log(0.5) + 0.75 * math.log(1.5),
        0.0,
        0.5 * math.log(2.0) + 0.5 * math.log(2 / 3),
    ]
    for chunk in (1, 2, 1024):
        close(full_kl(logits, ref, chunk), expected, 1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kinds_have_the_exact_kl_as_mean(kind, close):
    policy, ref = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], dtype=torch.float64)
    mean = (policy * kl_penalty(policy.log(), ref.log(), kind)).sum()
    close(mean, full_kl(policy.log()[None], ref.log()[None]).item(), 1e-12)


def test_the_mean_gradient_of_k2_is_that_of_the_exact_kl():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.6, 0.3, 0.1]).double().log()
    lp = logits.log_softmax(-1)
    sampled = (lp.exp().detach() * kl_penalty(lp, ref, "k3+")).sum()
    exact = full_kl(logits[None], ref[None]).sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (sampled, exact)))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(0.11, 1.0 * (1 + 0.1 * 64 / 640)), (9.0, 1 + 0.2 * 0.1), (0.0, 1 - 0.2 * 0.1), (0.1, 1.0)],
)
def test_the_adaptive_coefficient_moves_by_a_bounded_step(measured, expected):
    assert adapt_coef(1.0, measured, target=0.1, horizon=640, sequences=64) == pytest.approx(expected)
