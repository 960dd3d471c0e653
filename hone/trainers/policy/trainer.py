"""Reinforcement learning of a policy: GRPO, PPO and their variants use this loop with different parts.

    prompts --draw--> episodes (environment <-> rollout engine) --> rewards --> filters --> pack      collect
                                                                                              |
      rollout <--publish-- actor, critic <--learn-- mini-batches <-- advantages <-- forwards <-'      update

One thread runs both halves in turn; inside `collect` everything happens on one event loop (`run.event_loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hone.algorithms.algorithm import Algorithm
from hone.data.packing import columns, minibatches, pack, select
from hone.envs.episode import Play
from hone.trainers.policy.annotators import Annotator, learners_of
from hone.trainers.policy.collection import RolloutLog
from hone.trainers.policy.evaluation import Evaluator
from hone.trainers.policy.feed import PART, Feed
from hone.trainers.policy.health import RunHealth
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.supply import PromptSupply, StepGroups
from hone.trainers.policy.teachers import TeacherChoice
from hone.trainers.run.checkpoints import Checkpoint, PartWriter
from hone.trainers.run.context import RunContext
from hone.trainers.run.learners import Learner, Trained
from hone.trainers.run.loop import Trainer
from hone.trainers.run.lost_steps import LostSteps
from hone.trainers.run.recorder import NotFinite
from hone.types import Axis, Batch, merge_metrics
from hone.workers.rollout_role import RolloutHandle
from hone.workers.train import TrainHandle


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The parts of a policy trainer; `PolicyAssembly` builds them."""

    supply: PromptSupply
    feed: Feed
    play: Play
    algorithm: Algorithm
    actor: TrainHandle
    learners: Sequence[Learner]  # in the order in which they train on a mini-batch
    annotators: Sequence[Annotator]  # in the order in which a batch goes through them
    adjust: Sequence[Callable[[Batch], Batch]]  # what changes advantages after the algorithm has computed them
    teacher_choice: TeacherChoice | None
    rollout_log: RolloutLog
    evaluator: Evaluator
    rollout: RolloutHandle


class PolicyTrainer(Trainer):
    """Collects trajectories with the current weights, updates on them, and sends the new weights."""

    def __init__(self, config: PolicyRunConfig, parts: PolicyParts, context: RunContext) -> None:
        super().__init__(config.run.total_steps, config.checkpoint, context, evaluates=bool(config.evaluation.sets))
        self.supply = parts.supply
        self.feed = parts.feed
        self.play = parts.play
        self.algorithm = parts.algorithm
        self.actor = parts.actor
        self.learners = parts.learners
        self.annotators = parts.annotators
        self.adjust = parts.adjust
        self.teacher_choice = parts.teacher_choice
        self.rollout_log = parts.rollout_log
        self.evaluator = parts.evaluator
        self.rollout = parts.rollout
        self.health = RunHealth(config.reward.max_failed_fraction)
        self.watchers.append(self.health.look)
        self.lost = LostSteps(self.steps, self.tracking.message)
        self.prompts_per_step = config.update.prompts_per_step
        self.minibatches = config.update.minibatches
        self.epochs = config.update.epochs
        self.critic_warmup_steps = config.critic.warmup_steps if config.critic else 0
        self.seed = config.run.seed

    # ------------------------------------------------------------------------------------------------- the step

    def step(self, step: int) -> None:
        groups, batch = self.collect(step)
        measured = [groups.measure()]
        if batch is not None:
            batch = self.advantages(self.annotate(batch), step)
        self.rollout_log.write(step, groups.settled, batch)
        if batch is not None:
            self.learn(batch, self.cut(batch, step), step)
            measured.append(self.algorithm.measure(batch))
        for learner in self.learners:
            learner.end(step)
        if batch is not None:
            measured.append(self.feed.publish(self.actor, step))
            self.supply.trained()
        self.recorder.record(merge_metrics(*measured))

    def collect(self, step: int) -> tuple[StepGroups, Batch | None]:
        """The groups of a step, and one packed batch of them; None if filters or failures left nothing.

        Raises RewardsFailed, with the first failure's text, if failures have left nothing for several steps.
        """
        groups = self.supply.collect(self.play.at(step), self.prompts_per_step)
        self.health.note(groups.played)
        batch = pack(groups.settled) if groups.kept else None  # dropped groups have nothing trainable left
        if batch is None:
            self.lost.note(step, groups.settled)
        self.feed.commit(step, groups.settled, batch)
        self.rollout_log.infer(step, groups.settled, batch, self.actor)
        if batch is not None:
            self.recorder.tokens(batch.num_tokens)
            if self.teacher_choice is not None:
                batch = self.teacher_choice.assign(batch, groups.settled)
        return groups, batch

    def annotate(self, batch: Batch) -> Batch:
        """The batch with log-probs, values and process rewards that are computed before the update."""
        for annotator in self.annotators:
            batch = annotator(batch)
        return batch

    def advantages(self, batch: Batch, step: int) -> Batch:
        """The batch with advantages."""
        batch = self.algorithm.advantages(batch, pretraining=step <= self.critic_warmup_steps)
        for adjust in self.adjust:
            batch = adjust(batch)
        return batch

    def cut(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The mini-batches of every epoch, each with the loss weights of its whole optimizer step."""
        count = min(self.minibatches, len(batch.group_index.unique()))  # a mini-batch has one group at least
        for epoch in range(self.epochs):
            for indices in minibatches(batch, count, epoch, self.seed + step):
                yield self.algorithm.weigh(select(batch, indices))

    def learn(self, batch: Batch, minibatches: Iterable[Batch], step: int) -> None:
        """Take an optimizer step of every learner on each mini-batch of `batch`."""
        try:
            for minibatch in minibatches:
                for learner in self.learners:
                    learner.learn(minibatch, step)
        except NotFinite as error:
            raise NotFinite(f"{error}; fields of its batch: {', '.join(not_finite(batch)) or 'all finite'}") from error

    def changing_roles(self) -> list[TrainHandle]:
        return [learner.model for learner in self.learners] + learners_of(self.annotators)

    def trained_roles(self) -> list[TrainHandle]:
        """All models that learn."""
        trained = [learner.model for learner in self.learners if isinstance(learner, Trained)]
        return trained + learners_of(self.annotators)

    # --------------------------------------------------------------------------------- around the step (base.py)

    def evaluate(self, step: int) -> Mapping[str, float]:
        if not self.evaluator.due(step, self.steps):
            return {}
        with self.recorder.phase("evaluate"):
            return self.evaluator.run(step, self.feed.versions_of_evaluation())

    def score_of(self, figures: Mapping[str, float]) -> float | None:
        return self.evaluator.score(figures)

    def parts(self) -> Mapping[str, PartWriter]:
        parts: dict[str, PartWriter] = {role.role: role.save_checkpoint for role in self.changing_roles()}
        return parts | ({PART: self.feed.write} if self.feed.has_groups else {})

    def written(self, wait: bool) -> bool:
        done = [role.checkpoint_written(wait) for role in self.changing_roles()]  # each is a meeting of its ranks
        return self.feed.written(wait) and all(done)

    def state(self) -> dict[str, Any]:
        return {
            "prompts": self.supply.stream.state_dict(),
            "ledger": self.supply.ledger.state_dict(),
            "feed": self.feed.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        for role in self.changing_roles():
            role.load_checkpoint(checkpoint.part(role.role))
        self.supply.stream.load_state_dict(checkpoint.state["prompts"])
        self.supply.ledger.load_state_dict(checkpoint.state["ledger"])
        self.algorithm.load_state_dict(checkpoint.state["algorithm"])
        self.feed.restore(checkpoint, self.supply.stream, self.play, self.actor)

    def export(self, folder: Path) -> None:
        self.rollout.make_room()
        self.actor.export(folder, self.folder / "adapter")


def not_finite(batch: Batch) -> list[str]:
    """The fields of a batch that have a NaN or an infinite number on a trained token."""
    read = ((key, one) for key, axis, one in columns(batch) if axis is Axis.TOKEN and isinstance(one, Tensor))
    return [key or name for (name, key), one in read if not bool(one[batch.loss_mask].isfinite().all())]
