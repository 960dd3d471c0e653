"""Wires a run of the supervised family: settings in, a trainer whose parts fit each other out.

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

from hone.algorithms.preference_settings import KtoSettings, PreferenceSettings, ProcessSettings
from hone.config import ConfigError, count_as_read, plain
from hone.data.preference_readers import JudgedMaker, PairMaker, StepsMaker
from hone.data.settings import DatasetConfig
from hone.data.stream import ItemStream, MakerOf, SampleMaker, read_all
from hone.models.settings import ModelConfig
from hone.trainers.answering import Language, place_role
from hone.trainers.assembly import require_same_tokens
from hone.trainers.base import Place
from hone.trainers.preference import JudgedTask, PairTask
from hone.trainers.reference import (
    FILE,
    AskedModel,
    LiveReference,
    Reference,
    StoredReference,
    WithoutAdapter,
    is_its_own_reference,
    only_asked,
)
from hone.trainers.reward_tasks import ComparisonTask, StepTask
from hone.trainers.supervised import SftTask, SupervisedParts, SupervisedTrainer, Task
from hone.trainers.supervised_settings import (
    PreferenceRunConfig,
    RewardModelRunConfig,
    SupervisedConfig,
    SupervisedRunConfig,
)
from hone.workers.handles import TrainHandle
from hone.workers.train import TrainSpec

T = TypeVar("T")


class SupervisedAssembly:
    """Builds the parts that every kind has: the data, the model, the trainer."""

    def __init__(
        self, config: SupervisedConfig, model: ModelConfig, language: Language, place: Place, data_key: str = "data"
    ) -> None:
        """`data_key` is where the training data are set."""
        self._config = config
        self._model = model
        self._language = language
        self._place = place
        self._data_key = data_key

    @property
    def tokenizer(self) -> Any:
        return self._language.renderer.tokenizer

    def model(self, model_type: str = "language_model") -> TrainHandle:
        """The model that is trained."""
        config = self._config
        spec = TrainSpec(self._model, config.engine, model_type, total_steps=config.run.steps)
        return place_role("model", spec, config.runtime, self._place.recorder)

    def reference(self, other: ModelConfig | None, policy: TrainHandle) -> AskedModel:
        """The policy before training, or another model; asked only, and computed as the policy is."""
        engine = self._config.engine
        if other is None and is_its_own_reference(engine):
            return WithoutAdapter(policy)
        spec = TrainSpec(other or self._model, only_asked(engine, as_trained=other is None))
        return place_role("reference", spec, self._config.runtime, self._place.recorder)

    def trainer(self, maker: MakerOf[T], task: Task[T], model: TrainHandle) -> SupervisedTrainer[T]:
        """The trainer of a task, over the items that `maker` makes of rows."""
        config = self._config
        parts = SupervisedParts(
            source=ItemStream(maker, config.data, self._language.renderer, config.run.seed, self._data_key),
            task=task,
            model=model,
            held_out={name: self._held_out(maker, name, one) for name, one in config.evaluation_sets.items()},
            samples_per_step=config.samples_per_step,
            evaluate_every=config.evaluation_every_steps,
        )
        return SupervisedTrainer(config.run.steps, config.checkpoint, parts, self._place)

    def _held_out(self, maker: MakerOf[T], name: str, config: DatasetConfig) -> Sequence[T]:
        items, dropped = read_all(maker(name, config, self._language.renderer, f"evaluation_sets.{name}"))
        if dropped:
            self._place.tracking.message(f"evaluation set {name}: {dropped} rows are too long and were dropped")
        return items


def assemble_supervised(
    config: SupervisedRunConfig, model: ModelConfig, language: Language, place: Place, data_key: str = "data"
) -> SupervisedTrainer:
    """A fine-tuning trainer with its data opened and its model loaded."""
    parts = SupervisedAssembly(config, model, language, place, data_key)
    return parts.trainer(SampleMaker, SftTask(config.aggregation), parts.model())


def assemble_preference(
    config: PreferenceRunConfig, model: ModelConfig, language: Language, place: Place
) -> SupervisedTrainer:
    """A trainer of a preference loss; the reference is loaded if the loss needs one that is not on the disk yet."""
    loss = config.loss
    assert isinstance(loss, PreferenceSettings)
    count_as_read(loss)  # read anew in every step
    parts = SupervisedAssembly(config, model, language, place)
    policy = parts.model()
    reference = _reference(config, parts, policy, place) if loss.needs_reference else None
    budget = config.engine.max_tokens_per_microbatch
    if isinstance(loss, KtoSettings):
        judged = JudgedTask(loss, reference, budget, policy, place.recorder.record)
        return parts.trainer(JudgedMaker, judged, policy)
    if not loss.paired:
        raise ConfigError(f"loss {loss.name}: hone prefer knows how to judge single answers with kto only")
    return parts.trainer(PairMaker, PairTask(loss, reference, budget), policy)


def _reference(config: PreferenceRunConfig, parts: SupervisedAssembly, policy: TrainHandle, place: Place) -> Reference:
    other = config.reference.model
    if other is not None:
        require_same_tokens("reference.model", other, parts.tokenizer)
    if config.reference.logprobs == "live":
        return LiveReference(parts.reference(other, policy))
    if other is not None:
        count_as_read(other)  # by `load`, which a run that is continued need not call
    start = "the policy before training"  # which the run folder holds, whatever path leads there
    identity = json.dumps([start if other is None else plain(other), config.engine.compute_dtype], sort_keys=True)

    def load() -> AskedModel:
        place.tracking.message(f"computing the reference's log-probs, once: {FILE} in the run folder keeps them")
        return parts.reference(other, policy)

    return StoredReference(place.folder / FILE, identity, load)


def assemble_reward_model(
    config: RewardModelRunConfig, model: ModelConfig, language: Language, place: Place
) -> SupervisedTrainer:
    """A trainer of a value model that scores answers, or their steps."""
    parts = SupervisedAssembly(config, model, language, place)
    value_model = parts.model("value_model")
    if isinstance(config.loss, ProcessSettings):
        in_steps = partial(StepsMaker, separator=config.loss.step_separator)
        return parts.trainer(in_steps, StepTask(config.loss), value_model)
    task = ComparisonTask(config.loss, config.engine.max_tokens_per_microbatch)
    return parts.trainer(PairMaker, task, value_model)
