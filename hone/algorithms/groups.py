"""Statistics of prompt groups, in which an episode counts once however many trajectories it gave.

Rewards are taken to float64: equal rewards then have exactly zero spread, so a group that cannot teach anything gives
exactly zero advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.segments import loss_token_counts, sequence_sum
from hone.spans import repeat
from hone.types import Batch

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Episodes:
    """The E episodes of a batch and the group that each belongs to."""

    rewards: Tensor  # [E] float64, mean over the episode's trajectories
    lengths: Tensor  # [E] float64, loss tokens of all of them
    group: Tensor  # [E] int64, 0 .. number of groups - 1
    of_sequence: Tensor  # [N] int64, which episode a sequence belongs to
    num_groups: int

    @classmethod
    def of(cls, batch: Batch, rewards: Tensor) -> Episodes:
        """Fold [N] rewards into episodes."""
        numbers, of_sequence = torch.unique(batch.episode_index, return_inverse=True)
        groups, group_of_sequence = torch.unique(batch.group_index, return_inverse=True)
        zeros = torch.zeros(len(numbers), dtype=torch.float64, device=rewards.device)
        times = zeros.index_add(0, of_sequence, torch.ones_like(rewards, dtype=torch.float64))
        total = zeros.index_add(0, of_sequence, rewards.double())
        lengths = zeros.index_add(0, of_sequence, loss_token_counts(batch.loss_mask, batch.cu_seqlens).double())
        group = torch.zeros_like(numbers).scatter(0, of_sequence, group_of_sequence)
        return cls(total / times, lengths, group, of_sequence, len(groups))

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum over each episode's group, given back to every episode, [E] -> [E]."""
        return values.new_zeros(self.num_groups).index_add(0, self.group, values)[self.group]

    @property
    def size(self) -> Tensor:
        """Episodes in each episode's group, [E] float64."""
        return self.group_sum(torch.ones_like(self.rewards))

    @property
    def alone(self) -> Tensor:
        """Whether the episode is the only one of its group, [E] bool."""
        return self.size == 1

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the group, [E]; 0 for a group of one, whose advantage is then its reward."""
        return torch.where(self.alone, 0, self.group_sum(values) / self.size)

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation over the group, [E]; 1 for a group of one."""
        centred = values - self.group_sum(values) / self.size
        variance = self.group_sum(centred.square()) / (self.size - 1).clamp(min=1)
        return torch.where(self.alone, 1, variance.sqrt())

    def on_tokens(self, per_episode: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
        """An episode's value on every loss token of all its trajectories, [E] -> [T]."""
        per_token = repeat(per_episode[self.of_sequence], batch.lengths)
        return torch.where(batch.loss_mask, per_token, 0).to(dtype)


def sequence_rewards(batch: Batch) -> Tensor:
    """The reward of each trajectory, [N]: the sum of its token rewards where it has any, else `batch.rewards`.

    Raises ValueError if the batch has no rewards.
    """
    if batch.rewards is None:
        raise ValueError("the batch has no rewards: fill Batch.rewards before computing advantages")
    if batch.token_rewards is None:
        return batch.rewards
    rewarded = loss_token_counts(batch.loss_mask, batch.cu_seqlens) > 0
    return torch.where(rewarded, sequence_sum(batch.token_rewards, batch.cu_seqlens), batch.rewards)
