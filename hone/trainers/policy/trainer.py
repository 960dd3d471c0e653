"""Reinforcement learning of a policy: GRPO, PPO and their variants use this loop with different parts.

    prompts --take--> episodes (environment <-> rollout engine) --> rewards --> keep? --> pack      collect
                                                                                            |
       rollout <--sync weights-- actor, critic <--train-- mini-batches <-- advantages <-- forwards   update

One thread runs both halves in turn; inside `collect` everything happens on one event loop (`run.event_loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.filtering.group_filter import lost_to_failures
from hone.data.packing import columns, minibatches, pack, select
from hone.data.stream import PromptStream
from hone.platforms.host_memory import give_back
from hone.schedule.window import Enough
from hone.trainers.policy.annotators import Annotator, learners_of
from hone.trainers.policy.checks import TokenBudgets
from hone.trainers.policy.collection import RolloutLog
from hone.trainers.policy.feed import PART, Feed, PromptSupply
from hone.trainers.policy.generation import Generation
from hone.trainers.policy.group_metrics import count_statuses, describe, describe_greedy, describe_lengths
from hone.trainers.policy.health import RunHealth
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.teachers import TeacherChoice
from hone.trainers.run.checkpoints import Checkpoint, PartWriter
from hone.trainers.run.context import RunContext
from hone.trainers.run.following import Following
from hone.trainers.run.loop import Trainer
from hone.trainers.run.recorder import NotFinite
from hone.types import Axis, Batch, LossFn, Metric, TrajectoryGroup
from hone.workers.train import TrainHandle


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The parts of a policy trainer; `PolicyAssembly` builds them."""

    prompts: PromptStream
    generation: Generation
    feed: Feed
    algorithm: Algorithm
    actor: TrainHandle
    critic: TrainHandle | None
    annotators: Sequence[Annotator]  # in the order in which a batch goes through them
    adjust: Sequence[Callable[[Batch], Batch]]  # what changes advantages after the algorithm has computed them
    objective: LossFn  # the actor's loss
    teacher_choice: TeacherChoice | None
    following: Following | None
    rollout_log: RolloutLog


class PolicyTrainer(Trainer):
    """Collects trajectories with the current weights, updates on them, and sends the new weights."""

    def __init__(self, config: PolicyRunConfig, parts: PolicyParts, context: RunContext) -> None:
        super().__init__(config.run.total_steps, config.checkpoint, context, evaluates=bool(config.evaluation.sets))
        self.collector = parts.generation.collector
        self.feed = parts.feed
        budgets = TokenBudgets(config)
        sampling = replace(parts.generation.play.sampling, max_sequence_tokens=budgets.longest)
        self.play = replace(parts.generation.play, sampling=sampling, greedy=parts.algorithm.needs_greedy)
        self.rollout = parts.generation.rollout
        self.algorithm = parts.algorithm
        self.actor = parts.actor
        self.critic = parts.critic
        self.annotators = parts.annotators
        self.adjust = parts.adjust
        self.objective = parts.objective
        self.teacher_choice = parts.teacher_choice
        self.following = parts.following
        self.evaluator = parts.generation.evaluator(context.tracking)
        self.rollout_log = parts.rollout_log
        checks = [budgets.check_drawn]
        if self.teacher_choice is not None:
            checks.append(self.teacher_choice.check)
        self.supply = PromptSupply(parts.prompts, parts.algorithm.groups, config.run.seed, checks)
        grouped = config.update.samples_per_prompt > 1
        self.health = RunHealth(config.reward.max_failed_fraction, grouped, self.tracking.message)
        self.watchers.append(self.health.look)
        self.prompts_per_step = config.update.prompts_per_step
        self.minibatches = config.update.minibatches
        self.epochs = config.update.epochs
        self.critic_warmup_steps = config.critic.warmup_steps if config.critic else 0
        self.seed = config.run.seed

    # ------------------------------------------------------------------------------------------------- the step

    def step(self, step: int) -> None:
        batch = self.collect(step)
        if batch is None:
            self.move_reference(step)
        else:
            self.update(batch, version=step)

    def collect(self, step: int) -> Batch | None:
        """Prompts -> episodes -> rewards -> filters -> one packed batch; None if the filters left nothing.

        Raises ValueError, with the first failure's text, if there is nothing because trajectories failed.
        """
        kept: list[TrajectoryGroup] = []
        drawn: list[TrajectoryGroup] = []
        played: list[TrajectoryGroup] = []
        for _ in range(self.algorithm.groups.max_draws):
            groups = self.algorithm.groups.shape(self.play_round(self.prompts_per_step - len(kept), step))
            drawn += groups
            played += self.settle(groups)
            kept = [group for group in played if group.trainable]
            if len(kept) == self.prompts_per_step:
                break
        self.recorder.record(describe_lengths(drawn, kept))
        if not kept and not all(lost_to_failures(group) for group in played):
            self.recorder.record({"train/skipped_updates": Metric.sum(1)})
            self.rollout_log.write(step, played, None, self.actor)
            self.feed.commit(step, played, None)
            return None
        batch = pack(played)  # dropped groups have nothing trainable left
        self.feed.commit(step, played, batch)
        self.recorder.tokens(batch.num_tokens)
        self.rollout.make_room()  # the log asks the trainer's model, too
        self.rollout_log.write(step, played, batch, self.actor)
        return batch if self.teacher_choice is None else self.teacher_choice.assign(batch, played)

    def update(self, batch: Batch, version: int) -> None:
        """Annotate -> advantages -> train -> move the reference, if it follows -> weight sync."""
        batch = self.advantages(self.annotate(batch), version)
        self.train(batch, self.cut(batch, version), version)
        self.move_reference(version)
        self.recorder.record(self.feed.publish(self.actor, version))
        self.supply.ledger.trained_all_finished(self.feed.ahead)
        give_back()  # return freed host memory to the system, once a step

    def train(self, batch: Batch, minibatches: Iterable[Batch], step: int) -> None:
        """Take an optimizer step on each mini-batch of `batch`."""
        self.update_begins()
        try:
            for minibatch in minibatches:
                for model, loss in self.learners(step):
                    model.train_batch(minibatch, loss)
        except NotFinite as error:
            raise NotFinite(f"{error}; fields of its batch: {', '.join(not_finite(batch)) or 'all finite'}") from error

    # ------------------------------------------------------------------------------------------------ its parts

    def play_round(self, missing: int, step: int) -> list[TrajectoryGroup]:
        """The scored groups of new prompts: of all, or with oversampling until `missing` of them can be kept."""
        groups = self.algorithm.groups
        wanted = groups.prompts_for(missing)
        prompts = self.supply.draw(self.feed.room(wanted, step))
        self.feed.admit(prompts, self.play.at(step), wanted, self.supply.before)
        played = self.feed.take(wanted, Enough(missing, groups.keeps) if wanted > missing else None)
        if len(played) < wanted:
            self.supply.put_back(after=played[-1].prompt.draw)
        self.recorder.record(self.supply.metrics())
        return played

    def settle(self, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups to train on, then the others, marked as not trainable and dropped in the ledger."""
        self.health.note(groups)
        self.recorder.record({**describe(groups), **describe_greedy(groups)})
        self.recorder.record(self.collector.metrics())
        self.supply.ledger.finished(group.prompt.draw for group in groups)
        kept, dropped = self.algorithm.groups.keep(groups)
        for one in dropped:
            self.supply.ledger.dropped([one.group.prompt.draw], one.reason)
        settled = [*kept, *(one.group for one in dropped)]
        self.recorder.record(self.algorithm.groups.measure())
        self.recorder.record({**count_statuses(settled), "rollout/groups_dropped": Metric.sum(len(dropped))})
        return settled

    def annotate(self, batch: Batch) -> Batch:
        """The batch with log-probs, values and process rewards that are computed before the update."""
        for annotator in self.annotators:
            if annotator.learner is not None:
                self.update_begins()
            batch = annotator(batch)
        return batch

    def advantages(self, batch: Batch, step: int) -> Batch:
        """The batch with advantages; records its metrics."""
        batch = self.algorithm.advantages(batch, pretraining=step <= self.critic_warmup_steps)
        self.recorder.record(self.algorithm.measure(batch))
        for adjust in self.adjust:
            batch = adjust(batch)
        return batch

    def cut(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The mini-batches of every epoch, each with the loss weights of its whole optimizer step."""
        count = min(self.minibatches, len(batch.group_index.unique()))  # a mini-batch has one group at least
        for epoch in range(self.epochs):
            for indices in minibatches(batch, count, epoch, self.seed + step):
                yield self.algorithm.weigh(select(batch, indices))

    def move_reference(self, step: int) -> None:
        """Move a reference that follows the policy towards it, if one is due after this step."""
        if self.following is not None and self.following.is_due(step):
            self.update_begins()
            self.following.move(self.actor)

    def changing_roles(self) -> list[TrainHandle]:
        """All models whose weights change, and so belong into a checkpoint."""
        return self.trained_roles() + ([] if self.following is None else [self.following.reference])

    def trained_roles(self) -> list[TrainHandle]:
        """All models that learn."""
        critic = [] if self.critic is None else [self.critic]
        return [self.actor, *critic, *learners_of(self.annotators)]

    def learners(self, step: int) -> Iterator[tuple[TrainHandle, LossFn]]:
        """The models that learn in this step, each with its loss."""
        if self.critic:
            yield self.critic, self.algorithm.value_objective()
        if step > self.critic_warmup_steps:
            yield self.actor, self.objective

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

    def finish(self) -> None:
        self.rollout.make_room()
        self.actor.export(self.folder)


def not_finite(batch: Batch) -> list[str]:
    """The fields of a batch that have a NaN or an infinite number on a trained token."""
    read = ((key, one) for key, axis, one in columns(batch) if axis is Axis.TOKEN and isinstance(one, Tensor))
    return [key or name for (name, key), one in read if not bool(one[batch.loss_mask].isfinite().all())]
