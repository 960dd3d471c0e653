"""Reward models: a value model that scores the better of two answers higher, or tells right steps from wrong ones.

pairs --> pack --> value at each answer's last token --> Bradley-Terry
steps --> pack --> value at the token after each step --> right or wrong
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hone.algorithms.preference import RewardModelObjective
from hone.algorithms.preference_settings import BradleyTerrySettings, ProcessSettings
from hone.algorithms.settings import AggregationSettings
from hone.config import count_as_read
from hone.data.preferences import Pair, Steps, pack_pairs, pack_steps
from hone.trainers.preference import PER_ANSWER, Fitting
from hone.trainers.supervised import weighed
from hone.types import Batch, LossFn

PER_STEP = AggregationSettings(mode="token_mean")
"""One token for each step: the mean over steps."""


class ComparisonTask:
    """Bradley-Terry: the chosen answer's score above the rejected one's."""

    measures: Mapping[str, str] = {
        "loss": "train/preference_loss",
        "accuracy": "train/preference_accuracy",
        "margin": "train/preference_margin",
    }

    def __init__(self, settings: BradleyTerrySettings, max_tokens: int) -> None:
        count_as_read(settings)  # read anew in every step
        self.objective: LossFn = RewardModelObjective(settings)
        self._fitting = Fitting(max_tokens)

    def collate(self, items: Sequence[Pair]) -> Batch:
        """Raises DataError for a pair that does not fit into a micro-batch."""
        self._fitting.check(items)
        return weighed(pack_pairs(items), PER_ANSWER)

    def prepare(self, coming: Iterator[Sequence[Pair]]) -> None:
        """Nothing: nobody else is asked."""


class StepTask:
    """A process reward model: each step right or wrong."""

    measures: Mapping[str, str] = {"loss": "train/preference_loss", "accuracy": "train/preference_accuracy"}

    def __init__(self, settings: ProcessSettings) -> None:
        self.objective: LossFn = RewardModelObjective(settings)

    def collate(self, items: Sequence[Steps]) -> Batch:
        return weighed(pack_steps(items), PER_STEP)

    def prepare(self, coming: Iterator[Sequence[Steps]]) -> None:
        """Nothing: nobody else is asked."""
