"""Implicit process rewards and the estimator `prime`, by hand."""

import math

import pytest
import torch

from hone.algorithms.advantages import rloo
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.process_reward.losses import (
    OUTCOMES,
    PROCESS_REWARDS,
    ProcessRewardObjective,
    implicit_rewards,
    measure_process_rewards,
    prime,
)
from hone.algorithms.process_reward.settings import PrimeSettings
from hone.algorithms.settings import AlgorithmConfig, RlooSettings
from hone.types import ModelOutput


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def batch(batches):
    """Three answers of one group: token means of the process rewards are 2, 1 and 3."""
    return batches.build(
        [[0, 1, 1], [0, 1], [0, 1, 0, 1]],
        rewards=[1.0, 0.0, 0.0],
        extras={"process_rewards": tensor([0, 1.0, 3.0, 0, 1.0, 0, 2.0, 0, 4.0])},
    )


def test_a_tokens_reward_is_its_log_ratio(close):
    mask = torch.tensor([False, True, True])
    close(implicit_rewards(tensor([9, -1.0, -2.0]), tensor([0, -3.0, -1.0]), mask, 0.5), [0, 1.0, -0.5])


def test_prime_by_hand(batch, close):
    # Baselines: the means of the others, 2, 2.5 and 1.5. Centred: (-1, 1), (-1.5), (0.5, 2.5), and their sums from each
    # token on. Outcomes leave-one-out: 1, -0.5, -0.5.
    found = prime(batch, PrimeSettings()).advantages
    close(found, [0, 0.0 + 1, 1.0 + 1, 0, -1.5 - 0.5, 0, 3.0 - 0.5, 0, 2.5 - 0.5])


def test_prime_discounts_process_rewards_only(batch, close):
    found = prime(batch, PrimeSettings(gamma=0.5, process_coef=2.0)).advantages
    close(found, [0, 2 * -0.5 + 1, 2 * 1.0 + 1, 0, 2 * -1.5 - 0.5, 0, 2 * 1.75 - 0.5, 0, 2 * 2.5 - 0.5])


def test_without_process_rewards_prime_is_rloo(batch):
    silent = PROCESS_REWARDS.on(batch, torch.zeros(9, dtype=torch.float64))
    expected = rloo(batch, RlooSettings()).advantages
    assert torch.equal(prime(silent, PrimeSettings()).advantages, expected)
    assert torch.equal(prime(batch, PrimeSettings(process_coef=0.0)).advantages, expected)


def test_an_answer_of_its_own_has_no_baseline(batches, close):
    batch = batches.build([[0, 1, 1]], rewards=[1.0], extras={"process_rewards": tensor([0, 0.25, 0.5])})
    close(prime(batch, PrimeSettings()).advantages, [0, 1.75, 1.5])


def test_an_episode_counts_once_in_the_baseline(batches, close):
    # Episode 0 has two trajectories with means 1 and 3: 2 in all, which is the baseline of episode 1.
    batch = batches.build(
        [[0, 1], [0, 1], [0, 1]],
        episodes=[0, 0, 1],
        rewards=[0.0, 0.0, 0.0],
        extras={"process_rewards": tensor([0, 1.0, 0, 3.0, 0, 5.0])},
    )
    close(prime(batch, PrimeSettings()).advantages, [0, 1 - 5, 0, 3 - 5, 0, 5 - 2])


def test_whitened_advantages_have_zero_mean_and_unit_variance(batch):
    found = prime(batch, PrimeSettings(whiten=True)).advantages[batch.loss_mask]
    assert found.mean().item() == pytest.approx(0, abs=1e-9)
    assert found.std().item() == pytest.approx(1, abs=1e-6)


def test_the_model_learns_from_the_cross_entropy_of_summed_rewards(batches, close):
    batch = batches.build(
        [[0, 1, 1], [0, 1]],
        ref_logprobs=[0, -1.0, -1.0, 0, -2.0],
        sequence_extras={"outcomes": tensor([1.0, 0.25])},
    )
    lp = tensor([7.0, 0.0, 0.0, 7.0, -2.0]).requires_grad_()
    result = ProcessRewardObjective(beta=0.5)(ModelOutput(logprobs=lp), batch)
    # Sums 0.5 * (1 + 1) = 1 and 0: -log sigmoid(1), and log 2 whatever the outcome.
    wrong = math.log1p(math.exp(-1.0))
    close(result.values, [0, 0, wrong, 0, math.log(2)])
    # d/dlp = beta (sigmoid(sum) - outcome), on every token of the answer
    one = 0.5 * (1 / (1 + math.exp(-1.0)) - 1)
    close(torch.autograd.grad(result.values.sum(), lp)[0], [0, one, one, 0, 0.5 * 0.25])
    shown, counted = result.metrics["train/cross_entropy"], result.counted["train/cross_entropy"]
    close(shown[counted], [wrong, math.log(2)])


def test_what_is_measured(batch):
    batch = OUTCOMES.on(batch, tensor([1, 0, 0]))
    metrics = measure_process_rewards(batch)
    assert metrics["process_reward/accuracy"].value == pytest.approx(1 / 3)  # all sums are positive, one outcome is
    assert metrics["process_reward/mean"].value == pytest.approx(11 / 5)


def test_a_missing_process_reward_is_named_and_asked_of_no_actor(batches):
    algorithm = Algorithm(AlgorithmConfig(preset="prime"), steps_per_batch=2)
    assert "process_rewards" in algorithm.required_fields
    assert algorithm.infer_needs == frozenset()
    with pytest.raises(ValueError, match="process_rewards"):
        algorithm.advantages(batches.build([[0, 1]], rewards=[1.0]).with_(old_logprobs=torch.zeros(2)))
