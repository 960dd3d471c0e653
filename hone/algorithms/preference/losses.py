"""Preference losses: the DPO family, KTO, and reward models.

In a batch of pairs, the two answers to one prompt share a `group_index`; `rewards` is 1 for the chosen answer and 0 for
the rejected one. The last loss token of both sequences carries the pair's loss, so `seq_mean_token_sum` is the mean
over pairs. Objectives with `whole_groups` need both answers in one micro-batch, and raise ValueError for half a pair.
Metrics count every sequence once, so they are means over pairs too.
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
from hone.algorithms.preference.settings import (
    BradleyTerrySettings,
    CombinedSettings,
    KtoSettings,
    MarginSettings,
    NoisySettings,
    OrpoSettings,
    PreferenceSettings,
    RewardModelLossSettings,
    SimpoSettings,
)
from hone.algorithms.segments import loss_token_counts, on_last_loss_token, sequence_sum, spread
from hone.types import Axis, Batch, Extra, LossOutput, ModelOutput

TIE = 1e-5  # a smaller margin is rounding
LARGEST_EXPONENT = 80.0  # exp(80) is 5e34, well within float32
KTO_BASELINE = Extra("kto_baseline", Axis.SEQUENCE)  # [N] float32: estimate of KL that KTO compares log-ratios with
LABELS = Extra("labels")  # [T] float32: 1 for a right step and 0 for a wrong one, where the loss mask is 1
MARGIN = "margin"  # of Batch.components: the margin by which the chosen answer should win, for reward models; optional


@dataclass(frozen=True, slots=True)
class Answers:
    """Summed log-probs and lengths of P answers, each [P]."""

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

    def margin(self, settings: MarginSettings) -> Tensor:
        """Margin f'(u) of the chosen answer minus f'(u) of the rejected one, [P].

        u is an answer's probability ratio to the reference, f the divergence (arXiv 2309.16240); for the reverse KL,
        f'(u) is the log-ratio.
        """
        return _slope(self.chosen.log_ratio, settings) - _slope(self.rejected.log_ratio, settings)


def _slope(log_ratio: Tensor, settings: MarginSettings) -> Tensor:
    """f'(exp(log_ratio)) without its constant, which cancels in the margin; exponents are at most 80."""
    match settings.f_divergence:
        case "forward_kl":
            return -(-log_ratio).clamp(max=LARGEST_EXPONENT).exp()
        case "js":
            return logsigmoid(log_ratio)
        case "alpha":
            power = (settings.alpha or 0.0) - 1
            return (power * log_ratio).clamp(max=LARGEST_EXPONENT).exp() / power
    return log_ratio


# ---------------------------------------------------------------------------------------------- losses of pairs, [P]


def dpo(pairs: Pairs, settings: MarginSettings) -> Tensor:
    """-log sigmoid(beta margin), arXiv 2305.18290."""
    return -logsigmoid(settings.beta * pairs.margin(settings))


def ipo(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """(margin - 1 / (2 beta))^2, with log-ratios averaged over each answer's tokens, arXiv 2310.12036."""
    chosen = pairs.chosen.log_ratio / pairs.chosen.lengths
    rejected = pairs.rejected.log_ratio / pairs.rejected.lengths
    return (chosen - rejected - 1 / (2 * settings.beta)).square()


def hinge(pairs: Pairs, settings: MarginSettings) -> Tensor:
    """max(0, 1 - beta margin), arXiv 2305.10425: 0 once beta margin is at least 1."""
    return torch.relu(1 - settings.beta * pairs.margin(settings))


def cdpo(pairs: Pairs, settings: NoisySettings) -> Tensor:
    """dpo with soft labels: a pair's label is wrong with probability e."""
    e, scaled = settings.label_smoothing, settings.beta * pairs.margin(settings)
    return -(1 - e) * logsigmoid(scaled) - e * logsigmoid(-scaled)


def robust(pairs: Pairs, settings: NoisySettings) -> Tensor:
    """dpo made unbiased: its mean over random label flips is the dpo of the true labels, arXiv 2403.00409."""
    e, scaled = settings.label_smoothing, settings.beta * pairs.margin(settings)
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
    """log(p / (1 - p)) of a log-prob, finite where p rounds to 1."""
    bounded = mean_lp.clamp(max=-1e-6)
    return bounded - torch.log(-torch.expm1(bounded))


def sft(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """-mean lp chosen: the likelihood of the chosen answer, the generation part of MPO (arXiv 2411.10442)."""
    return -pairs.chosen.lp / pairs.chosen.lengths


def combined(pairs: Pairs, settings: CombinedSettings) -> Tensor:
    """Weighted sum of several pair losses, as in mixed preference optimisation, arXiv 2411.10442."""
    losses = (one.weight * PREFERENCE_LOSSES.get(one.loss.name)(pairs, one.loss) for one in settings.parts)
    return torch.stack(list(losses)).sum(0)


def kto(answers: Answers, desirable: Tensor, baseline: Tensor, settings: KtoSettings) -> Tensor:
    """Loss of unpaired answers against a KL baseline, [P], arXiv 2402.01306.

    Good: w (1 - sigmoid(beta (log-ratio - baseline))); bad: w (1 - sigmoid(beta (baseline - log-ratio))).
    """
    ahead = settings.beta * (answers.log_ratio - baseline)
    good = settings.desirable * (1 - torch.sigmoid(ahead))
    bad = settings.undesirable * (1 - torch.sigmoid(-ahead))
    return torch.where(desirable, good, bad)


def kto_baseline(log_ratios: Tensor) -> Tensor:
    """KTO's reference point: mean log-ratio of answers to other prompts of the mini-batch, at least 0."""
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
    """Objective of a language model with a preference loss by name.

    `train/chosen_reward` and `rejected_reward` are the implicit rewards: beta times an answer's log-ratio to the
    reference (without a reference: its log-prob), per token if the loss is length-normalised.
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
            baseline = KTO_BASELINE.needed(batch)
        losses = self._loss(answers, good, baseline, self._settings)
        ratio, threshold = self._settings.beta * answers.log_ratio, self._settings.beta * baseline
        above = _above(ratio, threshold)
        right = torch.where(good, above, 1 - above)
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
        """Metrics of each answer, [N]."""
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
    """Objective of a value model with a reward-model loss by name.

    An answer's score is the value at its last loss token, which covers everything before this token; so mark the
    end-of-sequence token. A step's score is the value at the token that follows it.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, settings: RewardModelLossSettings) -> None:
        self._loss: Callable[..., Tensor] = REWARD_MODEL_LOSSES.get(settings.name)
        self._settings = settings
        self.whole_groups = settings.paired

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
        labels = LABELS.needed(batch).to(values.dtype)
        losses = torch.where(batch.loss_mask, self._loss(values, labels, self._settings), 0)
        above = _above(values.detach(), torch.zeros_like(values))
        accuracy = torch.where(labels > 0.5, above, 1 - above)
        return LossOutput(losses, {"train/preference_loss": losses.detach(), "train/preference_accuracy": accuracy})


def pair_rows(group_index: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the chosen and of the rejected sequence of each pair, [P] each.

    Raises ValueError unless each group has one chosen and one rejected sequence.
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


def _above(values: Tensor, others: Tensor) -> Tensor:
    """Return 1 where a value is above the other, 0 where it is below, and a half for a tie.

    Before training all answers of DPO and KTO are ties, up to rounding.
    """
    margin = values - others
    tie = margin.abs() <= TIE * (values.abs() + others.abs()).clamp(min=1.0)
    return torch.where(tie, 0.5, (margin > 0).to(margin.dtype))


def _compared(chosen: dict[str, Tensor], rejected: dict[str, Tensor], by: str) -> dict[str, Tensor]:
    """Metrics of pairs, [P]: both answers' figures, and accuracy and margin in the figure `by`."""
    right = _above(chosen[by], rejected[by])
    shown = {"train/preference_accuracy": right, "train/preference_margin": chosen[by] - rejected[by]}
    for word, side in (("chosen", chosen), ("rejected", rejected)):
        shown |= {f"train/{word}_{name}": values for name, values in side.items()}
    return shown


def _on_both(per_pair: Tensor, first: Tensor, second: Tensor, batch: Batch, metrics: dict[str, Tensor]) -> LossOutput:
    """Put a pair's loss and metrics on the last loss token of both sequences."""

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
