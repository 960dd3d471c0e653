"""Reductions over packed sequences."""

import torch

from hone.algorithms.segments import (
    Grid,
    discounted_sum,
    on_last_loss_token,
    reward_to_go,
    sequence_extreme,
    sequence_mean,
    sequence_sum,
    spread,
    whiten,
)

CU = torch.tensor([0, 3, 3, 5])  # the second sequence is empty
MASK = torch.tensor([0, 1, 1, 0, 1]).bool()
X = torch.tensor([9.0, 1.0, 3.0, 9.0, 5.0]).double()


def test_sums_means_and_extremes(close):
    close(sequence_sum(X, CU), [13, 0, 14])
    close(sequence_mean(X, MASK, CU), [2, 0, 5])
    close(sequence_extreme(X, MASK, CU), [3, -torch.inf, 5])
    close(sequence_extreme(X, MASK, CU, largest=False), [1, torch.inf, 5])
    close(spread(torch.tensor([7.0, 8.0, 9.0]), CU), [7, 7, 7, 9, 9])


def test_rewards_go_on_the_last_loss_token(close):
    close(on_last_loss_token(torch.tensor([2.0, 3.0, 4.0]), MASK, CU), [0, 0, 2, 0, 4])
    nowhere = torch.tensor([0, 0, 0, 1, 0]).bool()
    close(on_last_loss_token(torch.tensor([2.0, 3.0, 4.0]), nowhere, CU), [0, 0, 0, 4, 0])


def test_whiten_uses_the_unbiased_variance(close):
    close(whiten(X, MASK), [0, -1, 0, 0, 1])  # of 1, 3, 5
    close(whiten(X, torch.tensor([1, 0, 0, 0, 0]).bool()), [0] * 5)
    close(whiten(X, torch.zeros(5, dtype=torch.bool)), [0] * 5)


def test_grid_closes_gaps_and_gives_back(close):
    mask = torch.tensor([1, 0, 1, 0, 1]).bool()
    grid = Grid.of(mask, CU)
    close(grid.gather(X), [[9, 3], [0, 0], [5, 0]])
    close(grid.scatter(grid.gather(X), 5), [9, 0, 3, 0, 5])


def test_discounted_sum_takes_a_decay_per_row(close):
    steps = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    close(discounted_sum(steps, 0.5), [[3, 4, 4], [3, 4, 4]])
    close(discounted_sum(steps, torch.tensor([0.5, 1.0])), [[3, 4, 4], [7, 6, 4]])


def test_reward_to_go_discounts_loss_tokens_only(close):
    rewards = torch.tensor([0, 0, 4.0, 0, 1.0])
    close(reward_to_go(rewards, MASK, CU, 0.5), [0, 2, 4, 0, 1])


def test_no_sequences_at_all():
    empty = torch.zeros(0)
    assert reward_to_go(empty, empty.bool(), torch.tensor([0])).shape == (0,)
