"""The process reward model of a run: learns from outcomes beside the policy, and rewards each token (PRIME).

batch with rewards and reference log-probs --judge--> [ one pass of training ] --> extras["process_rewards"]
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.aggregation import loss_weights
from hone.algorithms.process_reward import (
    OUTCOMES,
    PROCESS_REWARDS,
    ProcessRewardObjective,
    implicit_rewards,
    measure_process_rewards,
)
from hone.algorithms.segments import spread
from hone.algorithms.settings import AggregationSettings
from hone.data.packing import minibatches, select
from hone.trainers.recorder import Recorder
from hone.trainers.settings import ProcessRewardConfig
from hone.types import Batch
from hone.workers.handles import TrainHandle

AGGREGATION = AggregationSettings(mode="seq_mean_token_sum")  # the loss is one number for each answer


class ProcessRewards:
    """Trains the model on a batch's outcomes, once for each batch, and asks it what each token was worth."""

    def __init__(self, config: ProcessRewardConfig, model: TrainHandle, recorder: Recorder, parts: int) -> None:
        """`parts` is the number of optimizer steps in one pass over a batch."""
        self.model = model
        self._beta = config.beta
        self._outcome = config.outcome
        self._first = config.update == "before"
        self._recorder = recorder
        self._parts = parts
        self._objective = ProcessRewardObjective(config.beta)

    def judge(self, batch: Batch) -> Batch:
        """The batch with the process reward of each token; the model has learned from it afterwards.

        Raises ValueError for an outcome that is not between 0 and 1.
        """
        outcomes = spread(self._outcomes(batch), batch.cu_seqlens)
        batch = batch.with_(extras={**batch.extras, OUTCOMES: outcomes})
        if self._first:
            self._learn(batch)
        batch = self._rewarded(batch)
        if not self._first:
            self._learn(batch)
        self._recorder.record(measure_process_rewards(batch))
        return batch

    def _outcomes(self, batch: Batch) -> Tensor:
        found = batch.rewards if self._outcome == "reward" else batch.components.get(self._outcome)
        if found is None:
            raise ValueError(f"process_reward.outcome: {self._outcome!r} is not filled (reward, or a component)")
        wrong = ~((found >= 0) & (found <= 1))
        if bool(wrong.any()):
            raise ValueError(
                f"process_reward.outcome = {self._outcome} should be between 0 and 1, found "
                f"{found[wrong][0].item():g}; name a reward component that is"
            )
        return found

    def _learn(self, batch: Batch) -> None:
        count = min(self._parts, len(torch.unique(batch.group_index)))
        for indices in minibatches(batch, count, epoch=0, seed=0):
            part = select(batch, indices)
            weights = loss_weights(part.loss_mask, part.cu_seqlens, AGGREGATION)
            self.model.train_batch(part.with_(loss_weights=weights), self._objective)

    def _rewarded(self, batch: Batch) -> Batch:
        lp, ref = self.model.infer_batch(batch).logprobs, batch.ref_logprobs
        assert lp is not None
        assert ref is not None  # `trainers.assembly` sees to it
        rewards = implicit_rewards(lp, ref, batch.loss_mask, self._beta)
        return batch.with_(extras={**batch.extras, PROCESS_REWARDS: rewards})
