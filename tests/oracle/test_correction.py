"""Rollout correction beside verl's: importance weights, rejection masks, and what is measured.

Differences on purpose:
- `k1` rejection bounds the ratio R = pi_train / pi_rollout itself; verl bounds 1 / R (its k1 is -log R): verl is given
  the reciprocal bounds here;
- normalised weights have mean 1 over tokens, at both levels; verl takes the mean over sequences for `sequence`.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

from hone.algorithms.correction import accepted, importance_weights, mismatch, normalized
from hone.algorithms.settings import CorrectionSettings, RejectionSettings
from tests.oracle.sides import many, near, rows


def two_policies(sample):
    rollout = sample.logprobs(1)
    return sample.logprobs(2, rollout, 0.5), rollout


def packed(sample, *tensors):
    batch = sample.batch()
    return (*(sample.pack(tensor) for tensor in tensors), batch.loss_mask, batch.cu_seqlens)


@many
@given(rows(), st.sampled_from(["token", "sequence"]), st.sampled_from([2.0, (0.5, 2.0)]))
def test_weights(sample, level, bounds):
    old, rollout = two_policies(sample)
    band = bounds if isinstance(bounds, tuple) else None
    settings = CorrectionSettings(weights=level, truncate=None if band else bounds, band=band)
    expected, _ = compute_rollout_correction_weights(
        old - rollout, sample.mask, level, f"{band[0]}_{band[1]}" if band else bounds
    )
    found = importance_weights(*packed(sample, old, rollout), settings)
    near(sample.pad(found), expected)


@many
@given(rows())
def test_normalized_weights(sample):
    old, rollout = two_policies(sample)
    settings = CorrectionSettings(weights="token", truncate=2.0, normalize=True)
    expected, _ = compute_rollout_correction_weights(
        old - rollout, sample.mask, "token", 2.0, rollout_is_batch_normalize=True
    )
    _, _, mask, cu_seqlens = packed(sample, old, rollout)
    weights = importance_weights(sample.pack(old), sample.pack(rollout), mask, cu_seqlens, settings)
    near(sample.pad(normalized(weights, mask)), expected)


LEVELS = {"token": "token", "sequence_sum": "seq_sum", "sequence_mean": "seq_mean", "sequence_max": "seq_max"}


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
def test_rejection(level, statistic):
    if (level, statistic) == ("sequence_max", "k1"):
        with pytest.raises(ValueError, match="seq_max_k1"):
            compute_rollout_rejection_mask(torch.zeros(1, 1), torch.ones(1, 1), "seq_max_k1", "0.5_2.0")
        return  # verl has no such rule; hone's is tested by hand

    @many
    @given(rows(), st.sampled_from([0.05, 0.3]))
    def check(sample, bound):
        old, rollout = two_policies(sample)
        if statistic == "k1":
            low, high = 0.7, 1.2
            rule = RejectionSettings(statistic=statistic, level=level, low=low, high=high)
            threshold = f"{1 / high}_{1 / low}"
        else:
            rule = RejectionSettings(statistic=statistic, level=level, high=bound)
            threshold = bound
        expected, _ = compute_rollout_rejection_mask(
            old - rollout, sample.mask, f"{LEVELS[level]}_{statistic}", threshold
        )
        found = accepted(*packed(sample, old, rollout), [rule])
        near(sample.pad(found.double()), expected)

    check()


@many
@given(rows())
def test_measures(sample):
    old, rollout = two_policies(sample)
    expected = compute_offpolicy_metrics(old, rollout, sample.mask)
    found = {name: metric.value for name, metric in mismatch(*packed(sample, old, rollout)).items()}
    for mine, other in {
        "correction/kl": "kl",
        "correction/k3": "k3_kl",
        "correction/chi2_token": "chi2_token",
        "correction/chi2_sequence": "chi2_seq",
        "correction/trainer_perplexity": "training_ppl",
        "correction/rollout_perplexity": "rollout_ppl",
        "correction/log_perplexity_difference": "log_ppl_diff",
    }.items():
        assert found[mine] == pytest.approx(expected[other], abs=1e-5, rel=1e-5), mine
