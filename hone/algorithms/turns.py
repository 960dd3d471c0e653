"""Estimators that give each turn of an episode its own credit.

A turn is a run of sampled tokens; what an environment says lies between two. The reward of a turn is the sum of its
token rewards: `pack` places an environment's rewards at the ends of turns, and the reward functions' on the last one.
With one turn, `mt_grpo` and `gigpo` equal `grpo`, and `turn_gae` equals `gae`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages import EPSILON, Advantages, Episodes, normalised, sequence_rewards, token_rewards
from hone.algorithms.segments import Staircase, compared, sequence_ids, whiten
from hone.algorithms.settings import GigpoSettings, MtGrpoSettings, TurnGaeSettings
from hone.types import Batch


@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of a batch, in its order; M is the number of sampled tokens."""

    tokens: Tensor  # [M] position of each sampled token in the batch
    of_token: Tensor  # [M] its turn
    starts: Tensor  # [K+1] turn k has the sampled tokens starts[k] to starts[k+1]
    sequence: Tensor  # [K]
    number: Tensor  # [K] the turn's position within its sequence, from 0
    last: Tensor  # [K] bool: whether it is the last of its sequence

    @classmethod
    def of(cls, batch: Batch) -> Turns:
        tokens = batch.sampled_mask.nonzero().squeeze(1)
        sequences = sequence_ids(batch.cu_seqlens)[tokens]
        begins = torch.ones_like(tokens, dtype=torch.bool)
        begins[1:] = (tokens[1:] != tokens[:-1] + 1) | (sequences[1:] != sequences[:-1])
        of_token = begins.cumsum(0) - 1
        first = begins.nonzero().squeeze(1)
        sequence = sequences[first]
        last = torch.ones_like(sequence, dtype=torch.bool)
        last[:-1] = sequence[1:] != sequence[:-1]
        place = torch.arange(len(first), device=tokens.device)
        earlier = torch.bincount(sequence, minlength=batch.num_sequences).cumsum(0).roll(1)
        earlier[0] = 0  # turns of the sequences before
        starts = torch.cat((first, first.new_tensor([len(tokens)])))
        return cls(tokens, of_token, starts, sequence, place - earlier[sequence], last)

    @property
    def count(self) -> int:
        return len(self.sequence)

    def sums(self, per_token: Tensor) -> Tensor:
        """Sum over the tokens of each turn, [T] -> [K]."""
        return per_token.new_zeros(self.count).index_add(0, self.of_token, per_token[self.tokens])

    def firsts(self, per_token: Tensor) -> Tensor:
        """The value at the first token of each turn, [T] -> [K]."""
        return per_token[self.tokens[self.starts[:-1]]]

    def following(self, per_turn: Tensor) -> Tensor:
        """The value of the next turn of the sequence, 0 after the last, [K] -> [K]."""
        after = torch.zeros_like(per_turn)
        after[:-1] = per_turn[1:]
        return torch.where(self.last, 0, after)

    def discounted_sum(self, per_turn: Tensor, decay: float, sequences: int) -> Tensor:
        """y_k = x_k + decay y_{k+1} over the turns of each sequence, [K] -> [K]."""
        ends = torch.bincount(self.sequence, minlength=sequences).cumsum(0)
        bounds = torch.cat((ends.new_zeros(1), ends))
        return Staircase.of(torch.ones_like(self.last), bounds).discounted_sum(per_turn, decay)

    def on_tokens(self, per_turn: Tensor, mask: Tensor) -> Tensor:
        """The value of a turn on each of its tokens in the mask [T], 0 elsewhere, [K] -> [T]."""
        placed = per_turn.new_zeros(len(mask)).index_copy(0, self.tokens, per_turn[self.of_token])
        return torch.where(mask, placed, 0)


def mt_grpo(batch: Batch, settings: MtGrpoSettings) -> Advantages:
    """grpo of each turn's own reward plus grpo of the outcome, arXiv 2505.11821.

    A turn before the last gets (its reward - mean) / std over the turns of the same number in its group, plus
    `outcome_coef` times the outcome's advantage; the last turn gets the outcome's advantage. The outcome is the reward
    without the rewards of the turns before the last. A turn that nothing can be compared with gets the outcome's only.
    """
    turns = Turns.of(batch)
    rewards = turns.sums(token_rewards(batch).double())
    early = torch.zeros(batch.num_sequences, dtype=torch.float64, device=rewards.device)
    early = early.index_add(0, turns.sequence, torch.where(turns.last, 0, rewards))
    episodes = Episodes.of(batch, sequence_rewards(batch).double() - early)
    outcome = normalised(episodes, episodes.rewards, settings.scale_by)[episodes.of_sequence][turns.sequence]
    alike = torch.stack((compared(batch)[turns.sequence], turns.number, turns.last.long()))
    own = _compared(rewards, torch.unique(alike, dim=1, return_inverse=True)[1], settings.scale_by != "none")
    advantages = torch.where(turns.last, outcome, own + settings.outcome_coef * outcome)
    return Advantages(_on_tokens(batch, turns, advantages))


def gigpo(batch: Batch, settings: GigpoSettings) -> Advantages:
    """grpo of the episode plus `weight` times grpo among turns that begin in the same state, arXiv 2505.10978.

    The second part compares the discounted return from each turn on over the turns of a group with equal anchors
    (`Batch.anchors`). Left out are turns whose state no other turn has, and a state in which episodes only begin,
    which the first part compares already. Raises ValueError if no state of an episode of several turns is known.
    """
    turns = Turns.of(batch)
    episodes = Episodes.of(batch, sequence_rewards(batch))
    whole = normalised(episodes, episodes.rewards, settings.scale_by)[episodes.of_sequence][turns.sequence]
    if batch.anchors is None:
        if bool((~turns.last).any()):
            raise ValueError(
                "gigpo compares turns that begin in equal states, and the environment names none; set the anchor of "
                "Start and StepResult, or choose another advantage"
            )
        return Advantages(_on_tokens(batch, turns, whole))
    rewards = turns.sums(token_rewards(batch).double())
    returns = turns.discounted_sum(rewards, settings.gamma, batch.num_sequences)
    _, state = torch.unique(turns.firsts(batch.anchors), return_inverse=True)
    later = torch.zeros(int(state.max()) + 1, device=state.device, dtype=torch.int64)
    later = later.index_add(0, state, (turns.number > 0).long())[state] > 0
    known = (turns.firsts(batch.anchors) >= 0) & later
    step = torch.where(known, _compared(returns, state, settings.scale_by != "none"), 0)
    return Advantages(_on_tokens(batch, turns, whole + settings.weight * step))


def turn_gae(batch: Batch, settings: TurnGaeSettings) -> Advantages:
    """gae within each turn, and gae from turn to turn between them, after VAGEN's two levels (arXiv 2510.16907).

    Turns: d_k = R_k + turn_gamma V_{k+1} - V_k and B_k = d_k + turn_gamma turn_lam B_{k+1}, with V_k before the first
    token of turn k. Tokens: as `gae` within a turn; the last token of turn k is followed by V_{k+1} and B_{k+1}. So
    credit passes a turn in one step, however long it is. Unlike VAGEN's, a last token keeps its own value as baseline.
    Raises ValueError without `batch.values`.
    """
    if batch.values is None:
        raise ValueError("turn_gae needs Batch.values, the critic's prediction before each token")
    turns, rewards = Turns.of(batch), token_rewards(batch)
    first, between = turns.firsts(batch.values), settings.turn_gamma * settings.turn_lam
    delta = turns.sums(rewards) + settings.turn_gamma * turns.following(first) - first
    later = turns.following(turns.discounted_sum(delta, between, batch.num_sequences))
    values, ends = batch.values[turns.tokens], turns.starts[1:] - 1
    after = torch.zeros_like(values)
    after[:-1] = settings.gamma * values[1:]
    after[ends] = settings.turn_gamma * turns.following(first)
    deltas = rewards[turns.tokens] + after - values
    deltas = deltas.index_add(0, ends, (between * later).to(deltas.dtype))
    stairs = Staircase.of(torch.ones_like(turns.of_token, dtype=torch.bool), turns.starts)
    advantages = stairs.discounted_sum(deltas, settings.gamma * settings.lam)
    placed, returns = (
        one.new_zeros(batch.num_tokens).index_copy(0, turns.tokens, one) for one in (advantages, advantages + values)
    )
    return Advantages(whiten(placed, batch.loss_mask), torch.where(batch.loss_mask, returns, 0))


def _compared(values: Tensor, alike: Tensor, scale: bool) -> Tensor:
    """Values minus the mean of those with the same number in `alike`, by their std if `scale`; 0 for one alone, [K]."""
    count = int(alike.max()) + 1 if len(alike) else 0

    def sums(of: Tensor) -> Tensor:
        return of.new_zeros(count).index_add(0, alike, of)[alike]

    size = sums(torch.ones_like(values))
    centred = values - sums(values) / size
    if scale:
        centred = centred / ((sums(centred.square()) / (size - 1).clamp(min=1)).sqrt() + EPSILON)
    return torch.where(size > 1, centred, 0)


def _on_tokens(batch: Batch, turns: Turns, per_turn: Tensor) -> Tensor:
    dtype = torch.float32 if batch.rewards is None else batch.rewards.dtype
    return turns.on_tokens(per_turn, batch.loss_mask).to(dtype)
