"""Tokens and trajectories picked over a whole batch."""

import pytest
import torch

from hone.algorithms.filtering.resampling import resample, resampling_weights
from hone.algorithms.filtering.settings import ResampleSettings
from hone.algorithms.segments import sequence_sum
from hone.algorithms.selection import covariance, random_by_covariance, top_by_covariance
from hone.algorithms.settings import ClipCovSettings, KlCovSettings


@pytest.fixture
def batch(batches):
    """Advantages 2, 0, -2 and old log-probs -1, -2, -3 on the loss tokens."""
    return batches.build([[0, 1, 1], [0, 1]], advantages=[9, 2.0, 0.0, 9, -2.0], old_logprobs=[9, -1.0, -2.0, 9, -3.0])


def test_covariance_is_centred_over_the_loss_tokens(batch, close):
    close(covariance(batch), [0, 2.0, 0, 0, 2.0])


def test_the_largest_covariances_are_picked(batch):
    skewed = batch.with_(old_logprobs=torch.tensor([9, -1.0, -2.0, 9, -4.5]).double())  # cov 3, 0, 4
    assert top_by_covariance(skewed, KlCovSettings(share=0.01)).nonzero().flatten().tolist() == [4]
    assert top_by_covariance(skewed, KlCovSettings(share=0.7)).nonzero().flatten().tolist() == [1, 4]


def test_only_tokens_inside_the_bounds_are_picked_at_random(batch):
    picked = random_by_covariance(batch, ClipCovSettings(share=1.0))
    assert picked.nonzero().flatten().tolist() == [1, 4]
    assert not random_by_covariance(batch, ClipCovSettings(cov_low=2.0)).any()
    assert not random_by_covariance(batch, ClipCovSettings(cov_high=2.0)).any()
    assert random_by_covariance(batch, ClipCovSettings(share=0.01)).sum() == 1


def test_the_random_pick_spreads_and_follows_its_token(batches):
    """Different log-probs pick different tokens, about equally often; the packing order does not matter."""
    masks = [[0] + [1] * 20] * 5
    hits = torch.zeros(5)
    for seed in range(60):
        noise = torch.rand(105, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        batch = batches.build(masks, advantages=torch.ones(105), old_logprobs=-noise)
        settings = ClipCovSettings(share=0.05, cov_low=-1.0, cov_high=1.0)
        picked = random_by_covariance(batch, settings)
        hits += sequence_sum(picked.double(), batch.cu_seqlens)
        order = [3, 1, 4, 0, 2]
        moved = random_by_covariance(batches.take(batch, order), settings)
        assert torch.equal(moved, picked[batches.positions(batch, order)])
    assert hits.sum() == 300
    assert (hits - 60).abs().max() < 30


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1.0, 0.0, 2.0, 1.0]),
        ({"power": 2.0}, [1.0, 0.0, 4.0, 1.0]),
        ({"scheme": "best_and_worst"}, [1.0, 0.0, 1.0, 0.0]),
        ({"scheme": "mostly_best"}, [0.1, 0.1, 0.4, 0.1]),
    ],
)
def test_resampling_weights(keys, expected, close):
    close(resampling_weights(torch.tensor([-1.0, 0.0, 2.0, 1.0]), ResampleSettings(**keys)), expected)


def test_rewards_of_0_are_all_equally_likely(close):
    close(resampling_weights(torch.zeros(3), ResampleSettings()), [1.0, 1.0, 1.0])


def test_resampling_draws_n_of_n_by_weight_and_seed():
    rewards = torch.tensor([1.0, 0.0, 3.0]).repeat(100)
    counts = resample(rewards, ResampleSettings(), seed=1)
    assert counts.sum() == 300
    assert (counts[1::3] == 0).all()
    assert 180 < counts[2::3].sum() < 270  # 225 expected
    assert torch.equal(counts, resample(rewards, ResampleSettings(), seed=1))
    assert not torch.equal(counts, resample(rewards, ResampleSettings(), seed=2))
