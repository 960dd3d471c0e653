"""Rollout correction: weights, rejection rules and the measured gap, by hand."""

import math

import pytest
import torch

from hone.algorithms.correction import accepted, importance_weights, mismatch, normalized
from hone.algorithms.settings import CorrectionSettings, RejectionSettings
from hone.types import Reducer

LOG2 = math.log(2.0)
# two sequences: ratios 2 and 0.5 with a masked token between; 4
OLD = torch.tensor([0, -1.0, 50.0, -1.0, 0, -1.0], dtype=torch.float64)
ROLLOUT = OLD - torch.tensor([0, LOG2, 9.0, -LOG2, 0, 2 * LOG2], dtype=torch.float64)
MASK = torch.tensor([0, 1, 0, 1, 0, 1]).bool()
CU = torch.tensor([0, 4, 6])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"weights": "token"}, [0, 2, 0, 0.5, 0, 4]),
        ({"weights": "token", "truncate": 3.0}, [0, 2, 0, 0.5, 0, 3]),
        ({"weights": "token", "band": [0.6, 2.5]}, [0, 2, 0, 0, 0, 0]),
        ({"weights": "sequence"}, [0, 1, 0, 1, 0, 4]),
        ({"weights": "sequence", "truncate": 2.0}, [0, 1, 0, 1, 0, 2]),
        ({"weights": "sequence", "band": [0.5, 2.0]}, [0, 1, 0, 1, 0, 0]),
    ],
)
def test_importance_weights(keys, expected, close):
    close(importance_weights(OLD, ROLLOUT, MASK, CU, CorrectionSettings(**keys)), expected)


def test_importance_weights_are_detached():
    old = OLD.clone().requires_grad_()
    assert not importance_weights(old, ROLLOUT, MASK, CU, CorrectionSettings(weights="token")).requires_grad


def test_normalized_weights_have_mean_1(close):
    close(normalized(torch.tensor([0, 2, 0, 0.5, 0, 0.5]), MASK), [0, 2, 0, 0.5, 0, 0.5])
    close(normalized(torch.tensor([0, 4.0, 0, 1.0, 0, 1.0]), MASK), [0, 2, 0, 0.5, 0, 0.5])


K3_2, K3_HALF, K3_4 = 1 - LOG2, -0.5 + LOG2, 3 - 2 * LOG2  # r - 1 - ln r


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"statistic": "k1", "level": "token", "low": 0.6}, [1, 0, 1]),
        ({"statistic": "k1", "level": "token", "high": 3.0}, [1, 1, 0]),
        ({"statistic": "k1", "level": "token", "low": 0.6, "high": 3.0}, [1, 0, 0]),
        ({"statistic": "k1", "level": "sequence_sum", "low": 0.9, "high": 1.1}, [1, 1, 0]),
        ({"statistic": "k1", "level": "sequence_mean", "high": 3.9}, [1, 1, 0]),
        ({"statistic": "k1", "level": "sequence_max", "low": 0.6}, [0, 0, 1]),
        ({"statistic": "k1", "level": "sequence_max", "low": 0.4, "high": 2.1}, [1, 1, 0]),
        ({"statistic": "k2", "level": "token", "high": 0.5 * LOG2**2 + 1e-6}, [1, 1, 0]),
        ({"statistic": "k3", "level": "token", "high": K3_HALF + 1e-6}, [0, 1, 0]),
        ({"statistic": "k3", "level": "sequence_sum", "high": K3_2 + K3_HALF + 1e-6}, [1, 1, 0]),
        ({"statistic": "k3", "level": "sequence_sum", "high": K3_2 + K3_HALF - 1e-6}, [0, 0, 0]),
        ({"statistic": "k3", "level": "sequence_mean", "high": (K3_2 + K3_HALF) / 2 + 1e-6}, [1, 1, 0]),
        ({"statistic": "k3", "level": "sequence_max", "high": K3_2 - 1e-6}, [0, 0, 0]),
        ({"statistic": "k3", "level": "sequence_max", "high": K3_4 + 1e-6}, [1, 1, 1]),
    ],
)
def test_rejection(rule, kept, close):
    found = accepted(OLD, ROLLOUT, MASK, CU, [RejectionSettings(**rule)])
    close(found[MASK], [float(k) for k in kept])
    assert not found[~MASK].any()


def test_rules_must_all_agree(close):
    rules = [RejectionSettings(low=0.6), RejectionSettings(high=3.0)]
    close(accepted(OLD, ROLLOUT, MASK, CU, rules)[MASK], [1, 0, 0])
    assert torch.equal(accepted(OLD, ROLLOUT, MASK, CU, []), MASK)


def test_the_gap_is_measured(close):
    metrics = mismatch(OLD, ROLLOUT, MASK, CU)
    expected = {
        "correction/kl": -2 * LOG2 / 3,
        "correction/k3": (K3_2 + K3_HALF + K3_4) / 3,
        "correction/mean_abs_difference": 4 * LOG2 / 3,
        "correction/max_abs_difference": 2 * LOG2,
        "correction/chi2_token": (4 + 0.25 + 16) / 3 - 1,
        "correction/chi2_sequence": (1 + 16) / 2 - 1,
        "correction/ess": 6.5**2 / (3 * 20.25),
        "correction/outside_band": 1 / 3,
        "correction/trainer_perplexity": math.e,
        "correction/rollout_perplexity": (math.e + 4 * math.e) / 2,
        "correction/log_perplexity_difference": -LOG2,
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert metrics[name].value == pytest.approx(value), name
    assert metrics["correction/max_abs_difference"].reducer is Reducer.MAX
    assert metrics["correction/kl"].count == 3
    assert metrics["correction/chi2_sequence"].count == 2


def test_the_band_of_the_metric_is_the_band_of_the_weights():
    assert mismatch(OLD, ROLLOUT, MASK, CU, band=(0.6, 5.0))["correction/outside_band"].value == pytest.approx(1 / 3)
    assert mismatch(OLD, ROLLOUT, MASK, CU, band=(0.4, 5.0))["correction/outside_band"].value == 0


def test_equal_policies_have_no_gap():
    metrics = mismatch(OLD, OLD, MASK, CU)
    assert metrics["correction/ess"].value == 1
    others = set(metrics) - {"correction/ess", "correction/trainer_perplexity", "correction/rollout_perplexity"}
    assert all(metrics[name].value == 0 for name in others)


def test_a_batch_without_loss_tokens_measures_nothing():
    assert mismatch(OLD, ROLLOUT, torch.zeros_like(MASK), CU) == {}
