"""Advantage estimators: how much better than expected each sampled token was.

Each takes a batch and its settings and returns `Advantages`. It reads `batch.token_rewards` [T] (the sequence's reward
on its last sampled token, minus a KL penalty with `where: in_reward`) or, if not filled, `batch.rewards` [N]. Group
statistics count an episode once, and all its trajectories get its advantage. A group of one has mean 0 and deviation 1,
so A = r in all group estimators. A baseline reads `batch.sampled_mask`: a masked answer counts in it, with its length,
turns and log-probs, and gets no advantage of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.segments import (
    Staircase,
    compared,
    loss_token_counts,
    on_last_loss_token,
    reward_to_go,
    sequence_sum,
    spread,
    whiten,
)
from hone.algorithms.settings import (
    AdvantageSettings,
    GaeSettings,
    GdpoSettings,
    GpgAdvantageSettings,
    GrpoPassKSettings,
    GrpoSettings,
    ReinforcePpSettings,
)
from hone.spans import repeat
from hone.types import Batch

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of an estimator; both tensors are 0 outside the loss mask."""

    advantages: Tensor  # [T]
    returns: Tensor | None = None  # [T], targets of the critic; None without a critic


@dataclass(frozen=True, slots=True)
class Episodes:
    """The E episodes of a batch and their groups; an episode counts once, whatever its number of trajectories.

    Each role of an episode is an episode of its own, and the same role in the episodes of a prompt is a group.

    Rewards are float64, so that equal rewards have exactly zero variance and give exactly zero advantages.
    """

    rewards: Tensor  # [E] float64, mean over the episode's trajectories
    lengths: Tensor  # [E] float64, sampled tokens of all its trajectories
    group: Tensor  # [E] int64, 0 .. number of groups - 1
    of_sequence: Tensor  # [N] int64, the episode of each sequence
    num_groups: int

    @classmethod
    def of(cls, batch: Batch, rewards: Tensor) -> Episodes:
        """Average the rewards [N] of sequences over their episodes."""
        numbers, of_sequence = torch.unique(batch.episode_index, return_inverse=True)
        group_of_sequence = compared(batch)
        zeros = torch.zeros(len(numbers), dtype=torch.float64, device=rewards.device)
        times = zeros.index_add(0, of_sequence, torch.ones_like(rewards, dtype=torch.float64))
        total = zeros.index_add(0, of_sequence, rewards.double())
        lengths = zeros.index_add(0, of_sequence, loss_token_counts(batch.sampled_mask, batch.cu_seqlens).double())
        group = torch.zeros_like(numbers).scatter(0, of_sequence, group_of_sequence)
        return cls(total / times, lengths, group, of_sequence, int(group.max()) + 1)

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum over each episode's group, [E] -> [E]."""
        return values.new_zeros(self.num_groups).index_add(0, self.group, values)[self.group]

    @property
    def size(self) -> Tensor:
        """Episodes in each episode's group, [E] float64."""
        return self.group_sum(torch.ones_like(self.rewards))

    @property
    def alone(self) -> Tensor:
        """Return whether the episode is the only one of its group, [E] bool."""
        return self.size == 1

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the group, [E]; 0 for a group of one, so that its advantage is its reward."""
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
    """Reward of each trajectory, [N]: the sum of its token rewards if it has any, else `batch.rewards`.

    Raises ValueError if the batch has no rewards.
    """
    if batch.rewards is None:
        raise ValueError("the batch has no rewards: fill Batch.rewards before computing advantages")
    if batch.token_rewards is None:
        return batch.rewards
    rewarded = loss_token_counts(batch.sampled_mask, batch.cu_seqlens) > 0
    return torch.where(rewarded, sequence_sum(batch.token_rewards, batch.cu_seqlens), batch.rewards)


def token_rewards(batch: Batch) -> Tensor:
    """Rewards of tokens, [T]: `batch.token_rewards`, or each sequence's reward on its last sampled token."""
    if batch.token_rewards is not None:
        return batch.token_rewards
    return on_last_loss_token(sequence_rewards(batch), batch.sampled_mask, batch.cu_seqlens)


def gae(batch: Batch, settings: GaeSettings) -> Advantages:
    """Generalised advantage estimation over the loss tokens (arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, where t + 1 is the next loss token;
    V and A are 0 after the last one. Returns are A + V before whitening. `length_adaptive_alpha` is VAPO's lambda,
    1 - 1 / (alpha l) (arXiv 2504.05118). Raises ValueError without `batch.values`.
    """
    if batch.values is None:
        raise ValueError("gae needs Batch.values, the critic's prediction before each token")
    mask, stairs = batch.loss_mask, Staircase.of(batch.loss_mask, batch.cu_seqlens)
    values = batch.values.index_select(0, stairs.tokens)
    rewards = token_rewards(batch).index_select(0, stairs.tokens)
    delta = rewards + settings.gamma * stairs.following(values) - values
    lam: Tensor | float = settings.lam
    if settings.length_adaptive_alpha is not None:
        steps = stairs.counts.clamp(min=1)
        lam = (1 - 1 / (settings.length_adaptive_alpha * steps)).clamp(min=0).to(values.dtype)
    advantages = stairs.discounted_sum(delta, settings.gamma * lam)
    for_critic = advantages
    if settings.critic_lam is not None:
        for_critic = stairs.discounted_sum(delta, settings.gamma * settings.critic_lam)
    return Advantages(
        advantages=whiten(stairs.on_tokens(advantages, len(mask)), mask),
        returns=stairs.on_tokens(for_critic + values, len(mask)),
    )


def grpo(batch: Batch, settings: GrpoSettings) -> Advantages:
    """(r - mean of the group) / (std of the group + 1e-6), arXiv 2402.03300.

    `scale_by: none` does not divide (Dr.GRPO, arXiv 2503.20783); `batch` divides by the deviation of all episodes.
    """
    rewards = sequence_rewards(batch)
    episodes = Episodes.of(batch, rewards)
    return _on_tokens(batch, episodes, normalised(episodes, episodes.rewards, settings.scale_by))


def grpo_pass_k(batch: Batch, settings: GrpoPassKSettings) -> Advantages:
    """Only the best of a group gets an advantage: its lead over the second, arXiv 2503.19595.

    `scale` divides it by (std of the group + 1e-6). A group of one has advantage 0.
    """
    episodes = Episodes.of(batch, sequence_rewards(batch))
    order = torch.argsort(episodes.rewards, descending=True, stable=True)
    order = order[torch.argsort(episodes.group[order], stable=True)]
    sizes = torch.bincount(episodes.group, minlength=episodes.num_groups)
    first = sizes.cumsum(0) - sizes
    best, second = order[first[sizes > 1]], order[first[sizes > 1] + 1]
    lead = torch.zeros_like(episodes.rewards)
    lead[best] = episodes.rewards[best] - episodes.rewards[second]
    if settings.scale:
        lead = lead / (episodes.std(episodes.rewards) + EPSILON)
    return _on_tokens(batch, episodes, lead)


def gdpo(batch: Batch, settings: GdpoSettings) -> Advantages:
    """Weighted sum of grpo over each reward component separately, whitened over the batch, arXiv 2601.05242.

    Raises ValueError for a component that is missing in the batch or in one of its sequences.
    """
    total: Tensor | None = None
    for name, weight in settings.weights.items():
        if name not in batch.components:
            raise ValueError(f"gdpo: no reward component {name!r} (there is: {', '.join(sorted(batch.components))})")
        missing = int(batch.components[name].isnan().sum())
        if missing:
            raise ValueError(
                f"gdpo: reward component {name!r} is missing in {missing} of {batch.num_sequences} sequences"
            )
        episodes = Episodes.of(batch, batch.components[name])
        part = weight * normalised(episodes, episodes.rewards, "group")
        total = part if total is None else total + part
    assert total is not None  # the settings demand at least one weight
    return _whitened(batch, episodes, total)


def rloo(batch: Batch, settings: AdvantageSettings) -> Advantages:
    """n/(n-1) (r - mean of the group): the mean of the others is the baseline, arXiv 2402.14740."""
    episodes = Episodes.of(batch, sequence_rewards(batch))
    factor = episodes.size / (episodes.size - 1).clamp(min=1)
    return _on_tokens(batch, episodes, factor * (episodes.rewards - episodes.mean(episodes.rewards)))


def reinforce_pp(batch: Batch, settings: ReinforcePpSettings) -> Advantages:
    """Discounted reward-to-go, whitened over the batch; no group and no critic, arXiv 2501.03262."""
    returns = reward_to_go(token_rewards(batch), batch.loss_mask, batch.cu_seqlens, settings.gamma)
    return Advantages(whiten(returns, batch.loss_mask))


def reinforce_pp_baseline(batch: Batch, settings: AdvantageSettings) -> Advantages:
    """r - mean of the group on every token, whitened over the batch, arXiv 2501.03262."""
    episodes = Episodes.of(batch, sequence_rewards(batch))
    return _whitened(batch, episodes, episodes.rewards - episodes.mean(episodes.rewards))


def remax(batch: Batch, settings: AdvantageSettings) -> Advantages:
    """Reward-to-go minus the reward of one greedy answer to the same prompt, arXiv 2310.10505.

    Reads `batch.components["greedy_reward"]` [N]; raises ValueError without it.
    """
    if "greedy_reward" not in batch.components:
        raise ValueError('remax needs Batch.components["greedy_reward"], the reward of one greedy answer per prompt')
    returns = reward_to_go(token_rewards(batch), batch.loss_mask, batch.cu_seqlens)
    baseline = spread(batch.components["greedy_reward"].to(returns.dtype), batch.cu_seqlens)
    return Advantages(torch.where(batch.loss_mask, returns - baseline, 0))


def opo(batch: Batch, settings: AdvantageSettings) -> Advantages:
    """r - sum(length r) / sum(length) within the group, the optimal baseline, arXiv 2505.23585."""
    episodes = Episodes.of(batch, sequence_rewards(batch))
    total = episodes.group_sum(episodes.lengths).clamp(min=1)
    baseline = episodes.group_sum(episodes.lengths * episodes.rewards) / total
    return _on_tokens(batch, episodes, episodes.rewards - torch.where(episodes.alone, 0, baseline))


def gpg(batch: Batch, settings: GpgAdvantageSettings) -> Advantages:
    """alpha (r - mean of the group) / f_norm, alpha = episodes / episodes with a reward, arXiv 2504.02546."""
    episodes = Episodes.of(batch, sequence_rewards(batch))
    alpha = len(episodes.rewards) / (episodes.rewards != 0).sum().clamp(min=1)
    return _on_tokens(batch, episodes, alpha * (episodes.rewards - episodes.mean(episodes.rewards)) / settings.f_norm)


def max_rl(batch: Batch, settings: AdvantageSettings) -> Advantages:
    """(r - mean of the group) / (mean of the group + 1e-6), for binary rewards, arXiv 2602.02710.

    A group of one gives A = r. Raises ValueError for a reward outside [0, 1]: the mean is a success rate, and a
    negative mean would flip every sign.
    """
    episodes = Episodes.of(batch, sequence_rewards(batch))
    wrong = episodes.rewards[(episodes.rewards < 0) | (episodes.rewards > 1)]
    if len(wrong):
        raise ValueError(f"max_rl takes rewards between 0 and 1, found {wrong[0].item():g}")
    mean = episodes.mean(episodes.rewards)
    scaled = (episodes.rewards - mean) / (mean + EPSILON)
    return _on_tokens(batch, episodes, torch.where(episodes.alone, episodes.rewards, scaled))


def normalised(episodes: Episodes, rewards: Tensor, scale_by: str) -> Tensor:
    """Rewards minus their group's mean, divided by the chosen deviation, [E]."""
    centred = rewards - episodes.mean(rewards)
    if scale_by == "none":
        return centred
    if scale_by == "group":
        return torch.where(episodes.alone, centred, centred / (episodes.std(rewards) + EPSILON))
    deviation = rewards.std() if len(rewards) > 1 else torch.ones_like(rewards).squeeze()
    return torch.where(episodes.alone, centred, centred / (deviation + EPSILON))


def _on_tokens(batch: Batch, episodes: Episodes, per_episode: Tensor) -> Advantages:
    return Advantages(episodes.on_tokens(per_episode, batch, _dtype(batch)))


def _whitened(batch: Batch, episodes: Episodes, per_episode: Tensor) -> Advantages:
    spread_out = episodes.on_tokens(per_episode, batch, torch.float64)
    return Advantages(whiten(spread_out, batch.loss_mask).to(_dtype(batch)))


def _dtype(batch: Batch) -> torch.dtype:
    return torch.float32 if batch.rewards is None else batch.rewards.dtype
