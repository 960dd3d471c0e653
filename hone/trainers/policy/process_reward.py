"""The process reward model of a run: it learns from outcomes while the policy trains, and rewards each token (PRIME).

batch with rewards and reference log-probs --> [ one pass of training ] --> batch with process_rewards
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.aggregation import loss_weights
from hone.algorithms.process_reward.losses import (
    OUTCOMES,
    PROCESS_REWARDS,
    ProcessRewardObjective,
    implicit_rewards,
    measure_process_rewards,
)
from hone.algorithms.settings import AggregationSettings
from hone.data.packing import minibatches, select
from hone.trainers.policy.settings import ProcessRewardConfig
from hone.trainers.run.recorder import Recorder
from hone.types import Batch
from hone.workers.train import TrainHandle

AGGREGATION = AggregationSettings(mode="seq_mean_token_sum")  # the loss is one number for each answer


class ProcessRewards:
    """Trains the model on the outcomes of each batch in one pass, and computes the reward of each token."""

    def __init__(self, config: ProcessRewardConfig, model: TrainHandle, recorder: Recorder, parts: int) -> None:
        """`parts` is the number of optimizer steps in one pass over a batch."""
        self.learner: TrainHandle = model
        self._beta = config.beta
        self._outcome = config.outcome
        self._first = config.update == "before"
        self._recorder = recorder
        self._parts = parts
        self._objective = ProcessRewardObjective(config.beta)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the process reward of each token; the model learns from the batch before or after.

        Raises ValueError for an outcome that is not between 0 and 1.
        """
        batch = OUTCOMES.on(batch, self._outcomes(batch))
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
            self.learner.train_batch(part.with_(loss_weights=weights), self._objective)

    def _rewarded(self, batch: Batch) -> Batch:
        lp, ref = self.learner.infer_batch(batch).logprobs, batch.ref_logprobs
        assert lp is not None
        assert ref is not None  # `check_stages` saw to it
        return PROCESS_REWARDS.on(batch, implicit_rewards(lp, ref, batch.loss_mask, self._beta))
