"""Reinforcement learning of a policy: GRPO, PPO and their family are this loop with other parts.

    prompts --take--> episodes (environment <-> rollout engine) --> rewards --> keep? --> pack      collect
                                                                                            |
       rollout <--sync weights-- actor, critic <--train-- mini-batches <-- advantages <-- forwards   update

One thread runs both halves in turn; inside `collect` everything happens on one event loop (`trainers.loop`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.history import SKIPPED
from hone.algorithms.objective import REFERENCE_STATES
from hone.data.packing import minibatches, pack, select
from hone.data.stream import PromptStream
from hone.models.routing import ROUTES
from hone.platforms.host_memory import give_back
from hone.trainers.answering import Answering
from hone.trainers.base import Place, Trainer
from hone.trainers.checkpoints import Checkpoint, PartWriter
from hone.trainers.gallery import Gallery
from hone.trainers.ledger import PromptLedger
from hone.trainers.playing import count_statuses, describe, describe_greedy
from hone.trainers.process_reward import ProcessRewards
from hone.trainers.randomness import draw_chance
from hone.trainers.reference import AskedModel
from hone.trainers.settings import PolicyRunConfig
from hone.trainers.teachers import Teachers
from hone.types import Batch, LossFn, Metric, ModelOutput, Prompt, Status, TrajectoryGroup
from hone.workers.handles import TrainHandle


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """Everything a policy trainer is wired from (`trainers.assembly` builds it)."""

    prompts: PromptStream
    answering: Answering
    algorithm: Algorithm
    actor: TrainHandle
    critic: TrainHandle | None
    reference: AskedModel | None
    teachers: Teachers | None
    process_rewards: ProcessRewards | None
    gallery: Gallery


class PolicyTrainer(Trainer):
    """Collects trajectories with the current weights, updates on them, and sends the new weights."""

    def __init__(self, config: PolicyRunConfig, parts: PolicyParts, place: Place) -> None:
        super().__init__(config.run.steps, config.checkpoint, place)
        self.prompts = parts.prompts
        self.player = parts.answering.player
        self.play = replace(parts.answering.play, greedy=parts.algorithm.needs_greedy)
        self.rollout = parts.answering.rollout
        self.algorithm = parts.algorithm
        self.actor = parts.actor
        self.critic = parts.critic
        self.reference = parts.reference
        self.teachers = parts.teachers
        self.process_rewards = parts.process_rewards
        policy = parts.algorithm.policy_objective()
        self.objective = self.teachers.objective(policy) if self.teachers else policy
        routes = {ROUTES} if config.actor.routing_replay == "old_logprobs" else set()
        self.infer_needs = parts.algorithm.infer_needs | routes
        self.evaluator = parts.answering.evaluator(place.tracking)
        self.gallery = parts.gallery
        self.ledger = PromptLedger()
        self.prompts_per_step = config.update.prompts_per_step
        self.minibatches = config.update.minibatches
        self.epochs = config.update.epochs
        self.critic_warmup_steps = config.critic.warmup_steps if config.critic else 0
        self.seed = config.run.seed

    # ------------------------------------------------------------------------------------------------- the step

    def step(self, step: int) -> None:
        batch = self.collect(step)
        if batch is not None:
            self.update(batch, version=step)

    def collect(self, step: int) -> Batch | None:
        """Prompts -> episodes -> rewards -> filters -> one packed batch; None if the filters left nothing.

        Raises ValueError, with the first failure's text, if there is nothing because every trajectory failed.
        """
        kept: list[TrajectoryGroup] = []
        played: list[TrajectoryGroup] = []
        for _ in range(self.algorithm.max_draws):
            prompts = self.draw(self.prompts_per_step - len(kept))
            groups = self.algorithm.shape(self.player.play(prompts, self.play.at(step)))
            played += self.settle(groups)
            kept = [group for group in played if group.trainable]
            if len(kept) == self.prompts_per_step:
                break
        if not kept and any(one.status is Status.FILTERED for group in played for one in group.trajectories):
            self.recorder.record({"train/skipped_updates": Metric.sum(1)})
            self.gallery.show(step, played, None, self.actor)
            return None
        batch = pack(played)  # dropped groups have nothing trainable left
        self.recorder.tokens(batch.num_tokens)
        self.gallery.show(step, played, batch, self.actor)
        return self.teachers.assign(batch, played) if self.teachers else batch

    def update(self, batch: Batch, version: int) -> None:
        """Forwards -> advantages -> train -> weight sync."""
        self.rollout.make_room()
        if self.needs_old_logprobs:
            output = self.actor.infer_batch(batch, self.infer_needs)
            batch = batch.with_(old_logprobs=output.logprobs, extras={**batch.extras, **output.extras})
        if self.reference:
            batch = with_reference(batch, self.reference.infer_batch(batch, self.algorithm.reference_needs))
        if self.critic:
            batch = batch.with_(values=self.critic.infer_batch(batch).values)
        if self.teachers:
            batch = self.teachers.advise(batch)
        if self.process_rewards:
            self.update_begins()  # its model learns here
            batch = self.process_rewards.judge(batch)
        batch = self.algorithm.advantages(batch, pretraining=version <= self.critic_warmup_steps)
        self.recorder.record(self.algorithm.measure(batch))
        if self.teachers:
            batch = self.teachers.credit(batch)
        self.update_begins()
        for minibatch in self.cut(batch, version):
            for model, loss in self.learners(version):
                model.train_batch(minibatch, loss)
        self.recorder.record(self.rollout.sync_from(self.actor, version))
        self.ledger.trained_all_finished()
        give_back()  # once a step: what the driver needed at its most is no longer needed

    # ------------------------------------------------------------------------------------------------ its parts

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts of the stream that are worth playing, entered into the ledger as in flight."""
        prompts, skipped = self.prompts.take_unless(self.skips, count)
        self.ledger.drawn(sorted(prompt.draw for prompt in [*prompts, *skipped]))
        self.ledger.skipped((prompt.draw for prompt in skipped), SKIPPED)
        if self.teachers:
            self.teachers.require(prompts)
        if self.algorithm.skips_prompts:
            self.recorder.record({"rollout/prompts_skipped": Metric.sum(len(skipped))})
        self.recorder.record(
            {
                "rollout/epoch": Metric.max(self.prompts.epoch),
                "rollout/prompts_too_long": Metric.max(sum(self.prompts.dropped.values())),
            }
        )
        return prompts

    def skips(self, prompt: Prompt) -> bool:
        """Whether a prompt is passed over because it is expected to teach nothing; the same in every launch."""
        probability = self.algorithm.skip_probability(prompt.prompt_id)
        return probability > 0 and draw_chance(self.seed, prompt.draw) < probability

    def settle(self, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups worth training on, then the others with their trajectories marked; these leave the ledger."""
        self.recorder.record({**describe(groups), **describe_greedy(groups)})
        self.recorder.record(self.player.metrics())
        self.ledger.finished(group.prompt.draw for group in groups)
        kept, dropped = self.algorithm.keep(groups)
        for one in dropped:
            self.ledger.dropped([one.group.prompt.draw], one.reason)
        settled = [*kept, *(one.group for one in dropped)]
        self.recorder.record(self.algorithm.measure_prompts())
        self.recorder.record({**count_statuses(settled), "rollout/groups_dropped": Metric.sum(len(dropped))})
        return settled

    def cut(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The mini-batches of every epoch, each with the loss weights of its whole optimizer step."""
        count = min(self.minibatches, len(batch.group_index.unique()))  # fewer groups than asked for: fewer steps
        for epoch in range(self.epochs):
            for indices in minibatches(batch, count, epoch, self.seed + step):
                yield self.algorithm.weigh(select(batch, indices))

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy's log-probs are needed before the update."""
        of_teachers = self.teachers is not None and self.teachers.needs_old_logprobs
        return self.algorithm.needs_old_logprobs or of_teachers

    def trained_roles(self) -> list[TrainHandle]:
        """Every model that learns: what a checkpoint has to hold."""
        process = self.process_rewards.model if self.process_rewards else None
        return [role for role in (self.actor, self.critic, process) if role]

    def learners(self, step: int) -> Iterator[tuple[TrainHandle, LossFn]]:
        """Who learns in this step, and from which loss."""
        if self.critic:
            yield self.critic, self.algorithm.value_objective()
        if step > self.critic_warmup_steps:
            yield self.actor, self.objective

    # --------------------------------------------------------------------------------- around the step (base.py)

    def evaluate(self, step: int) -> Mapping[str, float]:
        if not self.evaluator.due(step, self.steps):
            return {}
        with self.recorder.phase("evaluate"):
            return self.evaluator.run(step)

    def score_of(self, figures: Mapping[str, float]) -> float | None:
        return self.evaluator.score(figures)

    def parts(self) -> Mapping[str, PartWriter]:
        return {role.role: role.save_checkpoint for role in self.trained_roles()}

    def written(self, wait: bool) -> bool:
        done = [role.checkpoint_written(wait) for role in self.trained_roles()]  # each is a meeting of its ranks
        return all(done)

    def state(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts.state_dict(),
            "ledger": self.ledger.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        for role in self.trained_roles():
            role.load_checkpoint(checkpoint.part(role.role))
        self.prompts.load_state_dict(checkpoint.state["prompts"])
        self.ledger.load_state_dict(checkpoint.state["ledger"])
        self.algorithm.load_state_dict(checkpoint.state["algorithm"])
        self.rollout.sync_from(self.actor, checkpoint.step)

    def finish(self) -> None:
        self.actor.export(self.folder)


def with_reference(batch: Batch, output: ModelOutput) -> Batch:
    """The batch with the reference's view of it: log-probs and, for KL over the whole vocabulary, hidden states."""
    batch = batch.with_(ref_logprobs=output.logprobs)
    if "states" not in output.extras:
        return batch
    return batch.with_(extras={**batch.extras, REFERENCE_STATES: output.extras["states"]})
