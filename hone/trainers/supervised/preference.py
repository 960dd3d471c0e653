"""Learning from preferences: pairs of answers (the DPO family), or single judged answers (KTO).

pairs  --> pack --> reference log-probs? --> loss of a pair
judged --> pack --> reference log-probs  --> loss of an answer, against the mini-batch's KL baseline:
           each prompt with another's answer --> log-probs of policy and reference --> mean, at least 0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from hone.algorithms.objective import present
from hone.algorithms.preference.losses import KTO_BASELINE, PreferenceObjective, kto_baseline
from hone.algorithms.preference.settings import KtoSettings, PreferenceSettings
from hone.algorithms.segments import sequence_sum
from hone.algorithms.settings import AggregationSettings
from hone.data.preferences import Judged, Pair, mismatched, pack_judged, pack_pairs
from hone.data.sources.base import DataError
from hone.trainers.supervised.budget import RowBudget
from hone.trainers.supervised.reference import Reference
from hone.trainers.supervised.trainer import weighed
from hone.types import Batch, LossFn, Metric
from hone.workers.train import RecordFn, TrainHandle

I = TypeVar("I", Pair, Judged)  # noqa: E741

PER_ANSWER = AggregationSettings(mode="seq_mean_token_sum")
"""The loss of an answer stands on one token; this is the mean over answers, and over pairs."""


class _PreferenceTask(Generic[I]):
    """Parts that pairs and judged answers share: the reference, the token budget, and the measurements."""

    measures: Mapping[str, str] = {
        "loss": "train/preference_loss",
        "accuracy": "train/preference_accuracy",
    }

    def __init__(self, settings: PreferenceSettings, reference: Reference | None, max_tokens: int) -> None:
        """`reference` is None for losses that need none."""
        self.objective: LossFn = PreferenceObjective(settings)
        self._reference = reference
        self._budget = RowBudget(max_tokens)

    def prepare(self, coming: Iterator[Sequence[I]], steps: int) -> None:
        """Let the reference compute what it needs for all batches of the run."""
        if self._reference is not None:
            batches = (batch for items in coming for batch in self._judged_by_reference(items))
            self._reference.prepare(batches, steps)

    def _judged_by_reference(self, items: Sequence[I]) -> list[Batch]:
        raise NotImplementedError

    def _with_reference(self, batch: Batch) -> Batch:
        return batch if self._reference is None else batch.with_(ref_logprobs=self._reference.logprobs(batch))


class PairTask(_PreferenceTask[Pair]):
    """The DPO family: pairs of a chosen and a rejected answer."""

    measures: Mapping[str, str] = {
        **_PreferenceTask.measures,
        "margin": "train/preference_margin",
    }

    def collate(self, items: Sequence[Pair]) -> Batch:
        """Raises DataError for a pair that does not fit into a micro-batch."""
        return self._with_reference(weighed(self._pack(items), PER_ANSWER))

    def _judged_by_reference(self, items: Sequence[Pair]) -> list[Batch]:
        return [self._pack(items)]

    def _pack(self, items: Sequence[Pair]) -> Batch:
        self._budget.check(items)
        return pack_pairs(items)


class JudgedTask(_PreferenceTask[Judged]):
    """KTO: single answers, good or bad, against a baseline that the whole mini-batch shares."""

    def __init__(
        self,
        settings: KtoSettings,
        reference: Reference | None,
        max_tokens: int,
        policy: TrainHandle,
        record: RecordFn,
    ) -> None:
        """`record` receives the number of prompts of a mini-batch that no other answer fits under."""
        super().__init__(settings, reference, max_tokens)
        self._baseline = settings.baseline
        self._max_tokens = max_tokens
        self._policy = policy
        self._record = record

    def collate(self, items: Sequence[Judged]) -> Batch:
        """Raises DataError for an answer that does not fit into a micro-batch, or without another to compare with."""
        self._budget.check(items)
        batch = self._with_reference(weighed(pack_judged(items), PER_ANSWER))
        if not self._baseline:
            return batch
        crossed = self._crossed(items)
        self._record({"train/kto_left_out": Metric.sum(len(items) - crossed.num_sequences)})
        baseline = torch.full((batch.num_sequences,), self._measured_baseline(crossed))
        return KTO_BASELINE.on(batch, baseline)

    def _measured_baseline(self, crossed: Batch) -> float:
        """The mean log-ratio of answers under other prompts, before this step's update."""
        logprobs = present(self._policy.infer_batch(crossed).logprobs, "the policy's log-probs")
        reference = present(self._with_reference(crossed).ref_logprobs, "Batch.ref_logprobs")
        ratios = torch.where(crossed.loss_mask, logprobs, 0), torch.where(crossed.loss_mask, reference, 0)
        own, other = (sequence_sum(values.double(), crossed.cu_seqlens) for values in ratios)
        return float(kto_baseline(own - other))

    def _judged_by_reference(self, items: Sequence[Judged]) -> list[Batch]:
        self._budget.check(items)
        return [pack_judged(items), *([self._crossed(items)] if self._baseline else [])]

    def _crossed(self, items: Sequence[Judged]) -> Batch:
        if len(items) < 2:
            raise DataError(
                "loss.baseline of kto puts each answer under another prompt: samples_per_step, and the rows of every "
                "evaluation set, should be at least 2, or loss.baseline false"
            )
        # Every row fits, so every answer fits under the shortest prompt: some always remain.
        return pack_judged(mismatched(items, self._max_tokens))
