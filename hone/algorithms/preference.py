"""Learning from preferences: the DPO family, KTO, and reward models.

A batch of pairs is packed like any other: the two answers to one prompt share a `group_index`, and `rewards` is 1 for
the chosen one and 0 for the rejected one. A pair's loss stands on the last loss token of both of its sequences, so
that aggregation `seq_mean_token_sum` is the mean over pairs. Pairs must not be split over micro-batches: objectives
say so by `whole_groups`, and refuse half a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hone.algorithms import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from hone.algorithms.objective import present
from hone.algorithms.preference_settings import (
    BradleyTerrySettings,
    KtoSettings,
    NoisySettings,
    OrpoSettings,
    PreferenceSettings,
    SimpoSettings,
)
from hone.algorithms.segments import loss_token_counts, on_last_loss_token, sequence_sum, spread
from hone.types import Batch, LossOutput, ModelOutput

KTO_BASELINE = "kto_baseline"  # of Batch.extras: the mini-batch's KL estimate on every token, see `kto_baseline`
LABELS = "labels"  # of Batch.extras: 1 for a right step and 0 for a wrong one, where loss_mask is 1


@dataclass(frozen=True, slots=True)
class Answers:
    """P answers: their summed log-probs and lengths, each [P]."""

    lp: Tensor
    ref: Tensor  # zeros where the loss needs no reference
    lengths: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.lp - self.ref


@dataclass(frozen=True, slots=True)
class Pairs:
    """P comparisons: `chosen[i]` won against `rejected[i]`."""

    chosen: Answers
    rejected: Answers

    @property
    def margin(self) -> Tensor:
        """By how much the policy prefers the chosen answer more than the reference does, [P]."""
        return self.chosen.log_ratio - self.rejected.log_ratio


# ---------------------------------------------------------------------------------------------- losses of pairs, [P]


def dpo(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """-log sigmoid(beta margin), arXiv 2305.18290."""
    return -logsigmoid(settings.beta * pairs.margin)


def ipo(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """(margin - 1 / (2 beta))^2, with log-ratios averaged over each answer's tokens, arXiv 2310.12036."""
    chosen = pairs.chosen.log_ratio / pairs.chosen.lengths
    rejected = pairs.rejected.log_ratio / pairs.rejected.lengths
    return (chosen - rejected - 1 / (2 * settings.beta)).square()


def hinge(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """max(0, 1 - beta margin), arXiv 2305.10425: nothing more to gain once the margin is won."""
    return torch.relu(1 - settings.beta * pairs.margin)


def cdpo(pairs: Pairs, settings: NoisySettings) -> Tensor:
    """dpo with soft labels: the pair is the other way round with probability e."""
    e, scaled = settings.label_smoothing, settings.beta * pairs.margin
    return -(1 - e) * logsigmoid(scaled) - e * logsigmoid(-scaled)


def robust(pairs: Pairs, settings: NoisySettings) -> Tensor:
    """dpo whose mean over flipped labels is the dpo of true ones, arXiv 2403.00409."""
    e, scaled = settings.label_smoothing, settings.beta * pairs.margin
    return (-(1 - e) * logsigmoid(scaled) + e * logsigmoid(-scaled)) / (1 - 2 * e)


def simpo(pairs: Pairs, settings: SimpoSettings) -> Tensor:
    """-log sigmoid(beta (mean lp chosen - mean lp rejected) - margin), without reference, arXiv 2405.14734."""
    means = pairs.chosen.lp / pairs.chosen.lengths - pairs.rejected.lp / pairs.rejected.lengths
    return -logsigmoid(settings.beta * means - settings.margin)


def orpo(pairs: Pairs, settings: OrpoSettings) -> Tensor:
    """-mean lp chosen - beta log sigmoid(log odds ratio), without reference, arXiv 2403.07691."""
    chosen, rejected = pairs.chosen.lp / pairs.chosen.lengths, pairs.rejected.lp / pairs.rejected.lengths
    log_odds_ratio = _log_odds(chosen) - _log_odds(rejected)
    return -chosen - settings.beta * logsigmoid(log_odds_ratio)


def _log_odds(mean_lp: Tensor) -> Tensor:
    """log(p / (1 - p)) of a log-prob; kept finite where p rounds to 1."""
    bounded = mean_lp.clamp(max=-1e-6)
    return bounded - torch.log(-torch.expm1(bounded))


def kto(answers: Answers, desirable: Tensor, baseline: Tensor, settings: KtoSettings) -> Tensor:
    """Unpaired answers against a KL baseline, [P], arXiv 2402.01306.

    Good: w (1 - sigmoid(beta (log-ratio - baseline))); bad: w (1 - sigmoid(beta (baseline - log-ratio))).
    """
    ahead = settings.beta * (answers.log_ratio - baseline)
    good = settings.desirable * (1 - torch.sigmoid(ahead))
    bad = settings.undesirable * (1 - torch.sigmoid(-ahead))
    return torch.where(desirable, good, bad)


def kto_baseline(log_ratios: Tensor) -> Tensor:
    """KTO's reference point: mean log-ratio of answers put under other prompts of the mini-batch, at least 0."""
    return log_ratios.detach().mean().clamp(min=0)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, settings: BradleyTerrySettings, margin: Tensor | float = 0.0
) -> Tensor:
    """-log sigmoid(s_c - s_r - margin) + centring (s_c + s_r)^2 of scores, [P], arXiv 2307.09288, 2312.09244."""
    return -logsigmoid(chosen - rejected - margin) + settings.centring * (chosen + rejected).square()


def process(scores: Tensor, labels: Tensor, settings: Any) -> Tensor:
    """Binary cross-entropy of each labelled token's score, [T], arXiv 2305.20050."""
    return -labels * logsigmoid(scores) - (1 - labels) * logsigmoid(-scores)


# ---------------------------------------------------------------------------------------------------- objectives


class PreferenceObjective:
    """A preference loss by name, for a language model."""

    needs: frozenset[str] = frozenset()

    def __init__(self, settings: PreferenceSettings) -> None:
        self._loss: Callable[..., Tensor] = PREFERENCE_LOSSES.get(settings.name)
        self._settings = settings
        self.whole_groups = settings.paired

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        answers = self._answers(present(output.logprobs, "ModelOutput.logprobs"), batch)
        chosen = present(batch.rewards, "Batch.rewards") > 0
        if self._settings.paired:
            first, second = pair_rows(batch.group_index, chosen)
            pairs = Pairs(_rows(answers, first), _rows(answers, second))
            per_pair = self._loss(pairs, self._settings)
            margin = pairs.margin.detach()
            metrics = {"train/preference_accuracy": (margin > 0).to(margin.dtype), "train/preference_margin": margin}
            return _on_both(per_pair, first, second, batch, metrics)
        baseline = _extra(batch, KTO_BASELINE)[batch.cu_seqlens[:-1]]
        values = self._loss(answers, chosen, baseline, self._settings)
        placed = on_last_loss_token(values, batch.loss_mask, batch.cu_seqlens)
        spread_out = spread(values.detach(), batch.cu_seqlens)
        return LossOutput(placed, {"train/preference_loss": spread_out})

    def _answers(self, lp: Tensor, batch: Batch) -> Answers:
        lp = sequence_sum(torch.where(batch.loss_mask, lp, 0), batch.cu_seqlens)
        ref = torch.zeros_like(lp)
        if self._settings.needs_reference:
            given = present(batch.ref_logprobs, "Batch.ref_logprobs")
            ref = sequence_sum(torch.where(batch.loss_mask, given, 0), batch.cu_seqlens)
        return Answers(lp, ref, loss_token_counts(batch.loss_mask, batch.cu_seqlens).clamp(min=1))


class RewardModelObjective:
    """A reward model's loss by name, for a value model.

    The score of an answer is the value at its last loss token, which is that of everything before this token: mark the
    end-of-sequence token.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, settings: BradleyTerrySettings | Any) -> None:
        self._loss: Callable[..., Tensor] = REWARD_MODEL_LOSSES.get(settings.name)
        self._settings = settings
        self.whole_groups = settings.name != "process"

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        values = present(output.values, "ModelOutput.values")
        if not self.whole_groups:
            losses = self._loss(values, _extra(batch, LABELS).to(values.dtype), self._settings)
            losses = torch.where(batch.loss_mask, losses, 0)
            right = (values > 0) == (_extra(batch, LABELS) > 0.5)
            accuracy = right.to(values.dtype)
            return LossOutput(losses, {"train/preference_loss": losses.detach(), "train/preference_accuracy": accuracy})
        ones = torch.ones(batch.num_sequences, dtype=values.dtype, device=values.device)
        scores = sequence_sum(values * on_last_loss_token(ones, batch.loss_mask, batch.cu_seqlens), batch.cu_seqlens)
        first, second = pair_rows(batch.group_index, present(batch.rewards, "Batch.rewards") > 0)
        per_pair = self._loss(scores[first], scores[second], self._settings)
        won = (scores[first] > scores[second]).to(values.dtype)
        margin = (scores[first] - scores[second]).detach()
        metrics = {"train/preference_accuracy": won, "train/preference_margin": margin}
        return _on_both(per_pair, first, second, batch, metrics)


def pair_rows(group_index: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the chosen and of the rejected sequence of each pair, [P] each.

    Raises ValueError unless each group is one chosen and one rejected sequence.
    """
    order = torch.argsort(group_index, stable=True)
    first, second = order[chosen[order]], order[~chosen[order]]
    whole = len(first) == len(second) and torch.equal(group_index[first], group_index[second])
    if not whole or len(torch.unique(group_index)) != len(first):
        raise ValueError(
            f"every group of a preference batch should be one chosen and one rejected sequence; found "
            f"{len(first)} chosen and {len(second)} rejected in {len(torch.unique(group_index))} groups"
        )
    return first, second


def _rows(answers: Answers, rows: Tensor) -> Answers:
    return Answers(answers.lp[rows], answers.ref[rows], answers.lengths[rows])


def _on_both(per_pair: Tensor, first: Tensor, second: Tensor, batch: Batch, metrics: dict[str, Tensor]) -> LossOutput:
    """A pair's loss on the last loss token of both sequences; its metrics on all of their tokens."""

    def of_sequences(values: Tensor) -> Tensor:
        return values.new_zeros(batch.num_sequences).index_add(0, torch.cat([first, second]), values.repeat(2))

    losses = on_last_loss_token(of_sequences(per_pair), batch.loss_mask, batch.cu_seqlens)
    shown = {"train/preference_loss": per_pair.detach(), **metrics}
    return LossOutput(losses, {name: spread(of_sequences(values), batch.cu_seqlens) for name, values in shown.items()})


def _extra(batch: Batch, name: str) -> Tensor:
    if name not in batch.extras:
        raise ValueError(f"Batch.extras[{name!r}] is missing, and this objective needs it")
    return batch.extras[name]
