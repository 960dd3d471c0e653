"""The one reducer: literal weights of every mode, and counts that add up."""

import pytest
import torch

from hone.algorithms.aggregation import StepCounts, loss_weights, step_counts
from hone.algorithms.settings import AggregationSettings

# sequences with 2, 1 and 0 loss tokens
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 0]).bool()
CU = torch.tensor([0, 3, 5, 7])


def settings(mode):
    return AggregationSettings(mode=mode, norm_tokens=8 if mode == "seq_mean_token_sum_norm" else None)


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        (None, 1 / 3, 1 / 3),
        ("token_mean", 1 / 3, 1 / 3),
        ("seq_mean_token_mean", 1 / 4, 1 / 2),
        ("seq_mean_token_sum", 1 / 2, 1 / 2),
        ("seq_mean_token_sum_norm", 1 / 16, 1 / 16),
        ("token_sum", 1.0, 1.0),
    ],
)
def test_weights_of_each_mode(mode, first, second, close):
    """The third sequence has no loss token: it is in no denominator."""
    weights = loss_weights(MASK, CU, settings(mode))
    assert weights.dtype == torch.float32
    close(weights, [0, first, first, 0, second, 0, 0], 1e-7)


def test_counts_of_parts_add_up_to_the_weights_of_the_whole(close):
    """Two ranks that hold one sequence each, with the sum of their counts."""
    for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"):
        whole = loss_weights(MASK, CU, settings(mode))
        first, second = (MASK[:3], torch.tensor([0, 3])), (MASK[3:], torch.tensor([0, 2, 4]))
        total = step_counts(*first) + step_counts(*second)
        assert total == StepCounts(tokens=3, sequences=2)
        parts = [loss_weights(*part, settings(mode), counts=total) for part in (first, second)]
        assert torch.equal(torch.cat(parts), whole)


def test_repeated_sequences_count_as_often_as_they_are_repeated(close):
    """The first sequence three times, the second not at all."""
    repeats = torch.tensor([3, 0, 1])
    assert step_counts(MASK, CU, repeats) == StepCounts(tokens=6, sequences=3)
    close(loss_weights(MASK, CU, settings("token_mean"), repeats=repeats), [0, 0.5, 0.5, 0, 0, 0, 0])
    close(loss_weights(MASK, CU, settings("seq_mean_token_mean"), repeats=repeats), [0, 0.5, 0.5, 0, 0, 0, 0])


def test_a_batch_without_any_loss_token_has_weight_0():
    assert (loss_weights(torch.zeros(7, dtype=torch.bool), CU, settings("token_mean")) == 0).all()
