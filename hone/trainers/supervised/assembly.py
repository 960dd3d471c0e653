"""Builds the trainer of a supervised run from its settings.

kind          items of a row    task             model
sft           Sample            SftTask          language_model
prefer        Pair | Judged     PairTask | ...   language_model, and a reference
reward_model  Pair | Steps      ComparisonTask   value_model
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from hone.algorithms.preference.settings import KtoSettings, PreferenceSettings, ProcessSettings
from hone.config import ConfigError, count_as_read, plain
from hone.data.counting import count_items
from hone.data.preference_readers import JudgedMaker, PairMaker, StepsMaker
from hone.data.rendering import Renderer
from hone.data.settings import DatasetConfig
from hone.data.stream import ItemStream, MakerOf, SampleMaker, read_all
from hone.data.templates.rendered import tell_rendered
from hone.models.settings import ModelConfig
from hone.platforms.base import compute_dtype, current_platform
from hone.trainers.run.context import RunContext
from hone.trainers.run.following import Follower, check_follow
from hone.trainers.run.roles import (
    frozen_engine,
    is_its_own_reference,
    place_role,
    require_same_vocabulary,
)
from hone.trainers.run.settings import FollowConfig
from hone.trainers.supervised.preference import JudgedTask, PairTask
from hone.trainers.supervised.reference import (
    FILE,
    LiveReference,
    Reference,
    StoredReference,
)
from hone.trainers.supervised.reward_tasks import ComparisonTask, StepTask
from hone.trainers.supervised.settings import (
    PreferenceRunConfig,
    RewardModelRunConfig,
    SupervisedConfig,
    SupervisedRunConfig,
)
from hone.trainers.supervised.trainer import SftTask, SupervisedParts, SupervisedTrainer, Task
from hone.workers.scoring import ScoringModel, WithoutAdapter
from hone.workers.train import TrainHandle, TrainSpec

T = TypeVar("T")
C = TypeVar("C", bound=SupervisedConfig)


class SupervisedAssembly:
    """Builds the parts that every kind has: the data, the model, the trainer."""

    def __init__(
        self,
        config: SupervisedConfig,
        model: ModelConfig,
        renderer: Renderer,
        context: RunContext,
        data_key: str = "data",
    ) -> None:
        """`data_key` is where the training data are set."""
        self._config = config
        self._model = model
        self._renderer = renderer
        self._context = context
        self._data_key = data_key

    @property
    def tokenizer(self) -> Any:
        return self._renderer.tokenizer

    def model(self, model_type: str = "language_model") -> TrainHandle:
        """The model that is trained."""
        config = self._config
        spec = TrainSpec(self._model, config.actor, model_type, total_steps=config.run.total_steps)
        return place_role("actor", spec, config.runtime, self._context.recorder)

    def reference(self, other: ModelConfig | None, policy: TrainHandle) -> ScoringModel:
        """The policy before training, or another model. It is never trained and uses the policy's engine settings."""
        if other is None and is_its_own_reference(self._config.actor):
            return WithoutAdapter(policy)
        return self._own_reference(other)

    def following(self, settings: FollowConfig | None, policy: TrainHandle) -> Follower | None:
        """A reference that begins as the policy before training and follows it, if the run has one."""
        return None if settings is None else Follower(self._own_reference(None, follows=True), policy, settings)

    def _own_reference(self, other: ModelConfig | None, follows: bool = False) -> TrainHandle:
        engine = frozen_engine(self._config.actor, keep_adapter=other is None)
        spec = TrainSpec(other or self._model, engine, follows=follows)
        return place_role("reference", spec, self._config.runtime, self._context.recorder)

    def trainer(
        self, maker: MakerOf[T], task: Task[T], model: TrainHandle, following: Follower | None = None
    ) -> SupervisedTrainer[T]:
        """The trainer of a task, over the items that `maker` makes of rows."""
        config = self._config
        parts = SupervisedParts(
            source=ItemStream(maker, config.data, self._renderer, config.run.seed, self._data_key),
            task=task,
            model=model,
            held_out={name: self._held_out(maker, name, one) for name, one in config.evaluation.sets.items()},
            samples_per_step=config.samples_per_step,
            evaluate_every=config.evaluation.every_steps if config.evaluation.sets else 0,
            following=following,
        )
        return SupervisedTrainer(config.run.total_steps, config.checkpoint, parts, self._context)

    def _held_out(self, maker: MakerOf[T], name: str, config: DatasetConfig) -> Sequence[T]:
        rows = maker(name, config, self._renderer, f"evaluation.sets.{name}")
        tell_rendered(rows.reader, not self._renderer.guards_rows)
        items, dropped = read_all(rows)
        if dropped:
            self._context.tracking.message(f"evaluation set {name}: {dropped} rows are too long and were dropped")
        return items


def maker_of(config: SupervisedConfig) -> MakerOf[Any]:
    """The class that makes a run's items from the rows of its data. Raises ConfigError for a loss without a reader."""
    loss = getattr(config, "loss", None)
    if isinstance(loss, KtoSettings):
        return JudgedMaker
    if isinstance(loss, ProcessSettings):
        return partial(StepsMaker, separator=loss.step_separator)
    if isinstance(loss, PreferenceSettings) and not loss.paired:
        raise ConfigError(f"loss {loss.name}: hone prefer reads single answers with loss kto only")
    return SampleMaker if loss is None else PairMaker


def with_steps(config: C, renderer: Renderer) -> C:
    """The settings with `run.steps`, counted from the training data if the run file sets `run.epochs`."""
    if config.run.epochs is None:
        return config
    items = count_items(maker_of(config), config.data, renderer, lambda one: one.max_sample_tokens is not None)
    return config.model_copy(update={"run": config.run.counted(items, config.samples_per_step)})


def assemble_supervised(
    config: SupervisedRunConfig, model: ModelConfig, renderer: Renderer, context: RunContext, data_key: str = "data"
) -> SupervisedTrainer[Any]:
    """A fine-tuning trainer with its data opened and its model loaded."""
    parts = SupervisedAssembly(config, model, renderer, context, data_key)
    task = SftTask(config.aggregation, config.actor.token_limit)
    return parts.trainer(maker_of(config), task, parts.model())


def assemble_preference(
    config: PreferenceRunConfig, model: ModelConfig, renderer: Renderer, context: RunContext
) -> SupervisedTrainer[Any]:
    """A trainer of a preference loss. Loads the reference if the loss needs one and its log-probs are not stored."""
    loss = config.loss
    count_as_read(loss)  # its values are read in every step
    parts = SupervisedAssembly(config, model, renderer, context)
    policy = parts.model()
    following = parts.following(config.reference.follow, policy)
    reference: Reference | None = None
    if following is not None:
        reference = LiveReference(following.model)
    elif loss.needs_reference:
        reference = _reference(config, parts, policy, context)
    budget = config.actor.token_limit
    if isinstance(loss, KtoSettings):
        judged = JudgedTask(loss, reference, budget, policy, context.recorder.record)
        return parts.trainer(maker_of(config), judged, policy, following)
    return parts.trainer(maker_of(config), PairTask(loss, reference, budget), policy, following)


def check_reference(config: PreferenceRunConfig) -> None:
    """Raise ConfigError if `reference.follow` is set and the rest of the run has no reference that could follow."""
    loss, reference = config.loss, config.reference
    if reference.follow is None:
        return
    if not loss.needs_reference:
        raise ConfigError(f"reference.follow: loss {loss.name} has no reference; remove the section reference")
    check_follow(reference, config.actor, {})
    if reference.logprobs != "live":
        raise ConfigError(
            "reference.follow needs the reference in every step, and reference.logprobs = "
            f"{reference.logprobs} runs it once before step 1; set reference.logprobs=live"
        )


def _reference(
    config: PreferenceRunConfig, parts: SupervisedAssembly, policy: TrainHandle, context: RunContext
) -> Reference:
    other = config.reference.model
    if other is not None:
        require_same_vocabulary("reference.model", other, parts.tokenizer)
    if config.reference.logprobs == "live":
        return LiveReference(parts.reference(other, policy))
    if other is not None:
        count_as_read(other)  # `load` reads it, and a continued run need not call `load`
    start = "the policy before training"  # not its path, which may change: the run folder holds the model
    dtype = compute_dtype(config.actor.compute_dtype, current_platform())
    identity = json.dumps([start if other is None else plain(other), dtype], sort_keys=True)

    def load() -> ScoringModel:
        context.tracking.message(f"computing the reference's log-probs, once: {FILE} in the run folder keeps them")
        return parts.reference(other, policy)

    return StoredReference(context.folder / FILE, identity, load)


def assemble_reward_model(
    config: RewardModelRunConfig, model: ModelConfig, renderer: Renderer, context: RunContext
) -> SupervisedTrainer[Any]:
    """A trainer of a value model that scores answers, or their steps."""
    parts = SupervisedAssembly(config, model, renderer, context)
    value_model = parts.model("value_model")
    if isinstance(config.loss, ProcessSettings):
        steps = StepTask(config.loss, config.actor.token_limit)
        return parts.trainer(maker_of(config), steps, value_model)
    task = ComparisonTask(config.loss, config.actor.token_limit)
    return parts.trainer(maker_of(config), task, value_model)
