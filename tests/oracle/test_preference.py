"""Preference losses that need no model of TRL's: value and gradient of its own loss methods.

The DPO family is compared over whole training steps in `test_trl_steps.py`. A difference on purpose: orpo's
log-likelihood term is the mean over pairs of each answer's token mean, TRL's is one mean over all tokens.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.algorithms.preference.losses import Answers, Pairs, cdpo, orpo, simpo
from hone.algorithms.preference.settings import CdpoSettings, OrpoSettings, SimpoSettings
from tests.oracle.sides import many, near

pytest.importorskip("trl.experimental.cpo", reason="this TRL has no CPO trainer")
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer


def means(seed, count):
    """Mean log-probs of `count` pairs, [2, count], with gradient."""
    generator = torch.Generator().manual_seed(seed)
    return (-torch.rand(2, count, generator=generator, dtype=torch.float64) - 0.01).requires_grad_()


def pairs(both):
    """hone's side: sums over answers of 4 tokens with these means."""
    lengths = torch.full_like(both[0], 4)
    chosen, rejected = (Answers(4 * one, torch.zeros_like(one), lengths) for one in both)
    return Pairs(chosen, rejected)


@many
@given(st.integers(0, 10_000), st.integers(1, 8), st.sampled_from([0.0, 0.5]))
def test_simpo(seed, count, margin):
    mine, other = means(seed, count), means(seed, count)
    found = simpo(pairs(mine), SimpoSettings(beta=2.0, margin=margin))
    device = SimpleNamespace(device="cpu")
    side = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=margin, beta=2.0, label_smoothing=0.0, accelerator=device
    )
    expected, *_ = CPOTrainer.cpo_loss(side, *other)
    near(found, expected)
    near(torch.autograd.grad(found.sum(), mine)[0], torch.autograd.grad(expected.sum(), other)[0])


@many
@given(st.integers(0, 10_000), st.integers(1, 8), st.sampled_from([0.1, 0.3]))
def test_cdpo(seed, count, smoothing):
    """TRL's CPO with soft labels is cDPO without a reference."""
    mine, other = means(seed, count), means(seed, count)
    found = cdpo(pairs(mine), CdpoSettings(beta=0.5, label_smoothing=smoothing))
    device = SimpleNamespace(device="cpu")
    side = SimpleNamespace(alpha=0.0, loss_type="sigmoid", beta=0.5, label_smoothing=smoothing, accelerator=device)
    expected, *_ = CPOTrainer.cpo_loss(side, *(4 * one for one in other))
    near(found, expected)
    near(torch.autograd.grad(found.sum(), mine)[0], torch.autograd.grad(expected.sum(), other)[0])


@many
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_orpo(seed, count):
    mine, other = means(seed, count), means(seed, count)
    found = orpo(pairs(mine), OrpoSettings(beta=0.1)) + mine[0]  # without its log-likelihood term
    side = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"))
    gained, *_ = ORPOTrainer.odds_ratio_loss(side, *other)  # in float32
    near(found, -gained, 1e-5)
    near(torch.autograd.grad(found.sum(), mine)[0], torch.autograd.grad(-gained.sum(), other)[0], 1e-5)
