"""Learning from preferences: the DPO family, KTO, and reward models.

A batch of pairs is packed like any other: the two answers to one prompt share a `group_index`, and `rewards` is 1 for
the chosen one and 0 for the rejected one. A pair's loss stands on the last loss token of both of its sequences, so
that aggregation `seq_mean_token_sum` is the mean over pairs. Pairs must not be split over micro-batches: objectives
say so by `whole_groups`, and refuse half a pair. Metrics count every sequence once, so they are means over pairs too.
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
MARGIN = "margin"  # of Batch.components: by how much the chosen answer is to win, for reward models; optional
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
    """A preference loss by name, for a language model.

    `train/chosen_reward` and `rejected_reward` are the implicit rewards: beta times an answer's log-ratio to the
    reference (without one: its log-prob), per token where the loss is.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, settings: PreferenceSettings) -> None:
        self._loss: Callable[..., Tensor] = PREFERENCE_LOSSES.get(settings.name)
        self._settings = settings
        self._baseline = isinstance(settings, KtoSettings) and settings.baseline
        self.whole_groups = settings.paired

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        answers = self._answers(present(output.logprobs, "ModelOutput.logprobs"), batch)
        good = present(batch.rewards, "Batch.rewards") > 0
        return self._compare(answers, good, batch) if self._settings.paired else self._judge(answers, good, batch)

    def _compare(self, answers: Answers, good: Tensor, batch: Batch) -> LossOutput:
        first, second = pair_rows(batch.group_index, good)
        pairs = Pairs(_rows(answers, first), _rows(answers, second))
        metrics = _compared(self._shown(pairs.chosen), self._shown(pairs.rejected), "reward")
        return _on_both(self._loss(pairs, self._settings), first, second, batch, metrics)

    def _judge(self, answers: Answers, good: Tensor, batch: Batch) -> LossOutput:
        baseline = torch.zeros_like(answers.lp)
        if self._baseline:
            baseline = _extra(batch, KTO_BASELINE)[batch.cu_seqlens[:-1]]
        losses = self._loss(answers, good, baseline, self._settings)
        right = ((answers.log_ratio > baseline) == good).to(losses.dtype)
        shown = {"train/preference_loss": losses.detach(), "train/preference_accuracy": right}
        counted = {name: _last_loss_tokens(batch) for name in shown}
        for word, rows in (("chosen", good), ("rejected", ~good)):
            for name, values in self._shown(answers).items():
                shown[f"train/{word}_{name}"] = values
                counted[f"train/{word}_{name}"] = _last_loss_tokens(batch) & spread(rows, batch.cu_seqlens)
        if self._baseline:
            shown["train/kto_baseline"] = baseline
        placed = on_last_loss_token(losses, batch.loss_mask, batch.cu_seqlens)
        return LossOutput(placed, {k: spread(v, batch.cu_seqlens) for k, v in shown.items()}, counted)

    def _shown(self, answers: Answers) -> dict[str, Tensor]:
        """What people are shown of each answer, [N]."""
        per = answers.lengths if self._settings.length_normalised else 1
        reward = self._settings.beta * answers.log_ratio / per
        return {"reward": reward.detach(), "logprob": answers.lp.detach()}

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
    end-of-sequence token. The score of a step is the value at the token that follows it.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, settings: BradleyTerrySettings | Any) -> None:
        self._loss: Callable[..., Tensor] = REWARD_MODEL_LOSSES.get(settings.name)
        self._settings = settings
        self.whole_groups = settings.name != "process"

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        values = present(output.values, "ModelOutput.values")
        return self._compare(values, batch) if self.whole_groups else self._classify(values, batch)

    def _compare(self, values: Tensor, batch: Batch) -> LossOutput:
        scores = sequence_sum(values * _last_loss_tokens(batch), batch.cu_seqlens)
        first, second = pair_rows(batch.group_index, present(batch.rewards, "Batch.rewards") > 0)
        margin = batch.components[MARGIN][first] if MARGIN in batch.components else 0.0
        per_pair = self._loss(scores[first], scores[second], self._settings, margin)
        metrics = _compared({"score": scores[first].detach()}, {"score": scores[second].detach()}, "score")
        return _on_both(per_pair, first, second, batch, metrics)

    def _classify(self, values: Tensor, batch: Batch) -> LossOutput:
        labels = _extra(batch, LABELS).to(values.dtype)
        losses = torch.where(batch.loss_mask, self._loss(values, labels, self._settings), 0)
        accuracy = ((values > 0) == (labels > 0.5)).to(values.dtype)
        return LossOutput(losses, {"train/preference_loss": losses.detach(), "train/preference_accuracy": accuracy})


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


def _compared(chosen: dict[str, Tensor], rejected: dict[str, Tensor], by: str) -> dict[str, Tensor]:
    """Metrics of pairs, [P]: both sides' figures, and who wins by one of them, and by how much."""
    margin = chosen[by] - rejected[by]
    shown = {"train/preference_accuracy": (margin > 0).to(margin.dtype), "train/preference_margin": margin}
    for word, side in (("chosen", chosen), ("rejected", rejected)):
        shown |= {f"train/{word}_{name}": values for name, values in side.items()}
    return shown


def _on_both(per_pair: Tensor, first: Tensor, second: Tensor, batch: Batch, metrics: dict[str, Tensor]) -> LossOutput:
    """A pair's loss on the last loss token of both sequences; its metrics are counted there."""

    def of_sequences(values: Tensor) -> Tensor:
        return values.new_zeros(batch.num_sequences).index_add(0, torch.cat([first, second]), values.repeat(2))

    losses = on_last_loss_token(of_sequences(per_pair), batch.loss_mask, batch.cu_seqlens)
    shown = {"train/preference_loss": per_pair.detach(), **metrics}
    spread_out = {name: spread(of_sequences(values), batch.cu_seqlens) for name, values in shown.items()}
    return LossOutput(losses, spread_out, dict.fromkeys(shown, _last_loss_tokens(batch)))


def _last_loss_tokens(batch: Batch) -> Tensor:
    """The last loss token of each sequence, [T] bool."""
    ones = torch.ones(batch.num_sequences, device=batch.loss_mask.device)
    return on_last_loss_token(ones, batch.loss_mask, batch.cu_seqlens) > 0


def _extra(batch: Batch, name: str) -> Tensor:
    if name not in batch.extras:
        raise ValueError(f"Batch.extras[{name!r}] is missing, and this objective needs it")
    return batch.extras[name]
