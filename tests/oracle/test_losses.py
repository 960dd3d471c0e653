"""Policy losses, value loss, KL and aggregation beside verl's: value and gradient.

Differences on purpose:
- `gmpo` goes through the one reducer (a row without loss tokens counts nowhere; with importance weights every token
  has its own, where verl takes their geometric mean), so it is compared without weights and with rows that all count;
- `clip_cov` and `kl_cov` pick their tokens once per mini-batch and by the old log-probs, where verl draws anew in each
  micro-batch: compared where both pick the same, at lp = old and with every candidate picked;
- `sapo` is aggregated by the run's mode, where verl always takes the mean over sequences;
- `dppo_kl` bounds p away from 1 by 1e-7 in place of adding 1e-8 inside the logarithm.
"""

import pytest
import torch
import verl.trainer.ppo.core_algos as verl
from hypothesis import given
from hypothesis import strategies as st
from verl.workers.config import ActorConfig, PolicyLossConfig

from hone.algorithms import POLICY_LOSSES
from hone.algorithms.aggregation import loss_weights
from hone.algorithms.kl import kl_penalty
from hone.algorithms.losses import LossInputs
from hone.algorithms.objective import ValueObjective
from hone.algorithms.selection import random_by_covariance, top_by_covariance
from hone.algorithms.settings import AggregationSettings, ValueLossSettings
from hone.types import ModelOutput
from tests.oracle.sides import MODES, many, near, rows


def config(**options):
    policy_loss = PolicyLossConfig(**options.pop("policy_loss", {}))
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=1,
        policy_loss=policy_loss,
        **options,
    )


def ours(name, sample, tensors, mode="token_mean", norm_tokens=None, **options):
    """hone's scalar and its gradient, padded."""
    settings = POLICY_LOSSES.settings(name)(**options)
    batch = sample.batch(advantages=tensors["advantages"], old_logprobs=tensors["old"])
    lp = sample.pack(tensors["lp"]).clone().requires_grad_()
    pick = {"clip_cov": random_by_covariance, "kl_cov": top_by_covariance}.get(name)
    inputs = LossInputs(
        lp=lp,
        old=sample.pack(tensors["old"]),
        advantages=sample.pack(tensors["advantages"]),
        mask=batch.loss_mask,
        cu_seqlens=batch.cu_seqlens,
        is_weights=None if tensors.get("weights") is None else sample.pack(tensors["weights"]),
        selected=pick(batch, settings) if pick else None,
    )
    values = POLICY_LOSSES.get(name)(inputs, settings).values
    aggregation = AggregationSettings(mode=mode, norm_tokens=norm_tokens)
    total = (values * loss_weights(batch.loss_mask, batch.cu_seqlens, aggregation).double()).sum()
    (gradient,) = torch.autograd.grad(total, lp)
    return total.detach(), sample.pad(gradient)


def theirs(function, sample, tensors, mode="token_mean", **options):
    lp = tensors["lp"].clone().requires_grad_()
    total, _ = function(
        tensors["old"],
        lp,
        tensors["advantages"],
        sample.mask,
        loss_agg_mode=MODES[mode],
        config=config(**options),
        rollout_is_weights=tensors.get("weights"),
    )
    (gradient,) = torch.autograd.grad(total, lp)
    return total.detach(), gradient


def draw(sample, weighted=False, scale=0.3):
    old = sample.logprobs(1)
    weights = torch.where(sample.mask > 0, sample.noise(4).abs() + 0.1, 0) if weighted else None
    return {"old": old, "lp": sample.logprobs(2, old, scale), "advantages": sample.noise(3), "weights": weights}


def same(found, expected, tolerance=1e-6):
    near(found[0], expected[0], tolerance)
    near(found[1], expected[1], tolerance)


CASES = {
    "ppo": (verl.compute_policy_loss_vanilla, {"dual_clip": 3.0}, {}),
    "ppo-dapo": (
        verl.compute_policy_loss_vanilla,
        {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5},
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
    ),
    "reinforce": (None, {}, {}),
    "gspo": (
        verl.compute_policy_loss_gspo,
        {"clip_low": 0.05, "clip_high": 0.08},
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08},
    ),
    "cispo": (
        verl.compute_policy_loss_cispo,
        {"clip_low": 0.2, "clip_high": 0.3},
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
    ),
    "dppo_tv": (
        verl.compute_policy_loss_dppo_tv,
        {"clip_low": 0.1, "clip_high": 0.15, "truncate": 2.0},
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 2.0},
    ),
    "dppo_kl": (
        verl.compute_policy_loss_dppo_kl,
        {"threshold": 0.02, "truncate": 2.0},
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.02, "clip_ratio_c": 2.0},
    ),
    "dro": (verl.compute_policy_loss_dro, {"beta": 0.3}, {"policy_loss": {"dro_beta": 0.3}}),
    "gpg": (verl.compute_policy_loss_gpg, {}, {}),
}


def reinforce(old, lp, advantages, mask, **options):
    return verl.compute_policy_loss_reinforce(old, lp, advantages, mask, **options)


@pytest.mark.parametrize("case", sorted(CASES))
def test_policy_loss(case):
    function, options, their_options = CASES[case]
    name = case.partition("-")[0]

    @many
    @given(
        rows(), st.sampled_from(["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum"]), st.booleans()
    )
    def check(sample, mode, weighted):
        tensors = draw(sample, weighted and name != "gpg")
        found = ours(name, sample, tensors, mode, **options)
        expected = theirs(function or reinforce, sample, tensors, mode, **their_options)
        same(found, expected)

    check()


@many
@given(rows(), st.booleans())
def test_sapo(sample, weighted):
    tensors = draw(sample, weighted)
    found = ours("sapo", sample, tensors, "seq_mean_token_mean", tau_positive=1.0, tau_negative=1.05)
    same(found, theirs(verl.compute_policy_loss_sapo, sample, tensors, tau_pos=1.0, tau_neg=1.05))


@many
@given(rows())
def test_gmpo(sample):
    tensors = draw(sample)
    found = ours("gmpo", sample, tensors, "seq_mean_token_mean", clip_low=0.2, clip_high=0.3)
    expected = theirs(verl.compute_policy_loss_geo_mean, sample, tensors, clip_ratio_low=0.2, clip_ratio_high=0.3)
    same(found, expected)


@many
@given(rows())
def test_clip_cov_where_every_candidate_is_picked(sample):
    tensors = draw(sample)
    tensors["lp"] = tensors["old"]
    found = ours("clip_cov", sample, tensors, share=1.0, cov_low=0.1, cov_high=5.0)
    cov = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
    same(found, theirs(verl.compute_policy_loss_clip_cov, sample, tensors, policy_loss=cov))


@many
@given(rows())
def test_kl_cov(sample):
    tensors = draw(sample)
    tensors["lp"] = tensors["old"]
    found = ours("kl_cov", sample, tensors, share=0.3, coef=1.0)
    cov = {"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0}
    same(found, theirs(verl.compute_policy_loss_kl_cov, sample, tensors, policy_loss=cov))


@many
@given(rows(), st.sampled_from(sorted(MODES)))
def test_aggregation(sample, mode):
    values = sample.noise(7)
    norm = 16 if mode == "seq_mean_token_sum_norm" else None
    expected = verl.agg_loss(values, sample.mask, MODES[mode], loss_scale_factor=norm)
    batch = sample.batch()
    weights = loss_weights(batch.loss_mask, batch.cu_seqlens, AggregationSettings(mode=mode, norm_tokens=norm))
    near((sample.pack(values) * weights.double()).sum(), expected)


@many
@given(rows(), st.sampled_from(["k1", "abs", "k2", "k3", "k1+", "k3+", "abs+"]))
def test_kl(sample, kind):
    ref = sample.logprobs(8)
    mine, other = (sample.logprobs(9, ref).requires_grad_() for _ in range(2))
    found, expected = kl_penalty(mine, ref, kind), verl.kl_penalty(other, ref, kind)
    near(found, expected)
    (found_gradient,) = torch.autograd.grad(found.sum(), mine)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), other)
    near(found_gradient * sample.mask, expected_gradient * sample.mask)


@many
@given(rows(), st.sampled_from([0.2, 1.0]))
def test_value_loss(sample, clip):
    old, returns = sample.noise(1), sample.noise(2)
    mine, other = (sample.noise(3).requires_grad_() for _ in range(2))
    batch = sample.batch(values=old, returns=returns)
    objective = ValueObjective(ValueLossSettings(clip=clip))
    values = objective(ModelOutput(values=sample.pack(mine)), batch).values
    found = (values * loss_weights(batch.loss_mask, batch.cu_seqlens, AggregationSettings()).double()).sum()
    expected, _ = verl.compute_value_loss(other, returns, old, sample.mask, clip)
    near(found, expected)
    near(torch.autograd.grad(found, mine)[0], torch.autograd.grad(expected, other)[0])
