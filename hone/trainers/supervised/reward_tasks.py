"""Reward models: a value model that scores the better of two answers higher, or classifies each step as right or wrong.

pairs --> pack --> value at each answer's last token --> Bradley-Terry
steps --> pack --> value at the token after each step --> right or wrong
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hone.algorithms.preference.losses import LABELS, RewardModelObjective
from hone.algorithms.preference.settings import ProcessSettings, RewardModelLossSettings
from hone.algorithms.settings import AggregationSettings
from hone.config import count_as_read
from hone.data.packing import pack_samples
from hone.data.preferences import Pair, Steps, pack_pairs
from hone.trainers.supervised.budget import RowBudget
from hone.trainers.supervised.preference import PER_ANSWER
from hone.trainers.supervised.trainer import weighed
from hone.types import Batch, LossFn

PER_STEP = AggregationSettings(mode="token_mean")
"""The loss has one token for each step; this is the mean over steps."""


class ComparisonTask:
    """Bradley-Terry: the chosen answer's score above the rejected one's."""

    measures: Mapping[str, str] = {
        "loss": "train/preference_loss",
        "accuracy": "train/preference_accuracy",
        "margin": "train/preference_margin",
    }

    def __init__(self, settings: RewardModelLossSettings, max_tokens: int) -> None:
        count_as_read(settings)  # its values are read in every step
        self.objective: LossFn = RewardModelObjective(settings)
        self._budget = RowBudget(max_tokens)

    def collate(self, items: Sequence[Pair]) -> Batch:
        """Raises DataError for a pair that does not fit into a micro-batch."""
        self._budget.check(items)
        return weighed(pack_pairs(items), PER_ANSWER)

    def prepare(self, coming: Iterator[Sequence[Pair]], steps: int) -> None:
        """Does nothing: there is no reference."""


def pack_steps(answers: Sequence[Steps]) -> Batch:
    """Pack answers in steps; `LABELS` has each step's verdict where the loss mask is 1."""
    batch = pack_samples([one.sample for one in answers])
    labels = torch.zeros(batch.num_tokens)
    labels[batch.loss_mask] = torch.tensor([label for one in answers for label in one.labels])
    return LABELS.on(batch, labels)


class StepTask:
    """A process reward model: each step right or wrong."""

    measures: Mapping[str, str] = {"loss": "train/preference_loss", "accuracy": "train/preference_accuracy"}

    def __init__(self, settings: ProcessSettings, max_tokens: int) -> None:
        self.objective: LossFn = RewardModelObjective(settings)
        self._budget = RowBudget(max_tokens)

    def collate(self, items: Sequence[Steps]) -> Batch:
        """Raises DataError for an answer that does not fit into a micro-batch."""
        self._budget.check(items)
        return weighed(pack_steps(items), PER_STEP)

    def prepare(self, coming: Iterator[Sequence[Steps]], steps: int) -> None:
        """Does nothing: there is no reference."""
