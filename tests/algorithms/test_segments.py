"""Reductions over packed sequences."""

import torch

from hone.algorithms.segments import (
    Grid,
    Staircase,
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


CU_STAIRS = torch.tensor([0, 3, 3, 4, 8, 10])
IN_STAIRS = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0, 1, 1]).bool()  # 2, 0, 0, 3 and 2 tokens


def test_discounted_sum_takes_a_decay_per_sequence(close):
    stairs = Staircase.of(IN_STAIRS, CU_STAIRS)
    values = torch.tensor([1.0, 2.0, 1.0, 2.0, 4.0, 8.0, 16.0])
    close(stairs.discounted_sum(values, 0.5), [2, 2, 3, 4, 4, 16, 16])
    decay = torch.tensor([0.5, 9.0, 9.0, 1.0, 0.25])
    close(stairs.discounted_sum(values, decay), [2, 2, 7, 6, 4, 12, 16])
    close(values, [1, 2, 1, 2, 4, 8, 16])  # untouched


def test_the_following_value_is_of_the_same_sequence(close):
    stairs = Staircase.of(IN_STAIRS, CU_STAIRS)
    following = stairs.following(torch.arange(1.0, 8.0))
    close(following, [2, 0, 4, 5, 0, 7, 0])
    close(stairs.on_tokens(following, 10), [2, 0, 0, 0, 4, 5, 0, 0, 7, 0])
    assert stairs.counts.tolist() == [2, 0, 0, 3, 2]


def test_recursions_over_nothing(close):
    stairs = Staircase.of(torch.zeros(10).bool(), CU_STAIRS)
    close(stairs.discounted_sum(torch.zeros(0), 0.5), [])
    close(stairs.on_tokens(stairs.following(torch.zeros(0)), 10), [0] * 10)


def test_reward_to_go_discounts_loss_tokens_only(close):
    rewards = torch.tensor([0, 0, 4.0, 0, 1.0])
    close(reward_to_go(rewards, MASK, CU, 0.5), [0, 2, 4, 0, 1])


def test_no_sequences_at_all():
    empty = torch.zeros(0)
    assert reward_to_go(empty, empty.bool(), torch.tensor([0])).shape == (0,)
