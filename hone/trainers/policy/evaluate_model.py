"""Runs a model in the place of a run's policy, without training: `hone eval`, `hone rollout serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hone.data.settings import PromptSetConfig
from hone.data.stream import make_renderer
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.rollout.settings import RolloutConfig
from hone.runtime import ranks
from hone.tracking.base import RunInfo
from hone.tracking.muted import MutedTracking
from hone.tracking.settings import TrackingConfig
from hone.trainers.policy.generation import Generation, OnGroup, agents_adapters, rollout_spec
from hone.trainers.policy.settings import EvaluationSamplingConfig, PolicyEvaluationConfig, PolicyRunConfig
from hone.trainers.run.context import RunContext, untracked_context
from hone.trainers.run.roles import frozen_engine, place_role, prepare_process
from hone.trainers.run.run_model import FOLDER, local_model
from hone.types import TrajectoryGroup
from hone.workers.rollout import serve_rollout
from hone.workers.train import TrainSpec


def evaluate_model(
    config: PolicyRunConfig,
    model: ModelConfig,
    adapters: Mapping[str, str] | None = None,
    on_group: OnGroup | None = None,
) -> dict[str, float]:
    """Measure one model on the evaluation sets of a run file; metrics are named `eval/<set>/...`.

    `adapters`: LoRA adapters of that model (name -> folder), evaluated too, as `eval/<name>/<set>/...`. `on_group` is
    called with each prompt's answers as soon as they have rewards: those of the model, then those of each adapter.
    """
    ranks.require_one("hone eval")
    with _answering(config, model, adapters or {}, on_group) as (generation, context):
        figures = generation.evaluator(context.tracking).run(step=0)
        for name in adapters or {}:
            found = generation.evaluator(context.tracking, name).run(step=0)
            figures |= {figure.replace("eval/", f"eval/{name}/", 1): value for figure, value in found.items()}
        return figures


def baseline_answers(
    config: PolicyRunConfig, model: ModelConfig, prompts: int
) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """The greedy answer to each of the first training prompts, and a group of answers sampled as in training."""
    rows: dict[str, PromptSetConfig] = {"train": config.data.train.model_copy(update={"max_rows": prompts})}
    sampling, samples = config.rollout.sampling, config.update.samples_per_prompt
    kept_as = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    chosen = EvaluationSamplingConfig(**kept_as)
    passes = [PolicyEvaluationConfig(sets=rows)]
    passes.append(PolicyEvaluationConfig(sets=rows, samples=samples, sampling=chosen))
    with _answering(config, model, {}) as (generation, context):
        kept = _Kept(TrackingConfig(trackers=()), RunInfo(run_dir=context.folder))
        for one in passes:
            generation.evaluator(kept, instead=one).run(step=0)
    greedy, sampled = kept.groups
    return greedy, sampled


class _Kept(MutedTracking):
    """Keeps the answers of each evaluation."""

    def __init__(self, config: TrackingConfig, run: RunInfo) -> None:
        super().__init__(config, run)
        self.groups: list[list[TrajectoryGroup]] = []

    def evaluated(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Keep the answers of one set."""
        self.groups.append(list(groups))


@contextmanager
def _answering(
    config: PolicyRunConfig, model: ModelConfig, adapters: Mapping[str, str], on_group: OnGroup | None = None
) -> Iterator[tuple[Generation, RunContext]]:
    """The generation of a run file with the weights of a model, and a context that writes nothing."""
    config = _computed_here(config)
    prepare_process(config.runtime)
    renderer = make_renderer(config.data, load_tokenizer(model), load_image_processor(model))
    context = untracked_context(Path(config.run.dir), renderer)
    generation = Generation(config, model, renderer, context.recorder, adapters=adapters, on_group=on_group)
    try:
        generation.begin()
        generation.start()
        policy = place_role(
            "policy", TrainSpec(model, frozen_engine(config.actor.alone())), config.runtime, context.recorder
        )
        generation.rollout.sync_from(policy, version=0)
        yield generation, context
    finally:
        generation.close()


def _computed_here(config: PolicyRunConfig) -> PolicyRunConfig:
    """The settings, in which hone's own engines take the place of a service, as the model is in a folder here."""
    if config.actor.backend.computes_here:
        return config
    actor = config.actor.model_copy(update={"backend": EngineConfig().backend})
    rollout = config.rollout.model_copy(update={"backend": RolloutConfig().backend})
    return config.model_copy(update={"actor": actor, "rollout": rollout})


def serve_run(config: PolicyRunConfig, address: str, ready: Callable[[str], None]) -> None:
    """Serve the model of a run at HOST:PORT, for runs of this run file elsewhere; returns never.

    Its weights come from the run. Raises ServerFailed when the server ends, and ConfigError.
    """
    prepare_process(config.runtime)
    with TemporaryDirectory(prefix="hone-serve-") as name:
        folder = Path(name)
        model = local_model(config.model, folder / FOLDER)
        renderer = make_renderer(config.data, load_tokenizer(model), load_image_processor(model))
        spec = replace(rollout_spec(config, model, renderer, agents_adapters(config)), folder=folder, runtime=None)
        asyncio.run(serve_rollout(spec, address, ready))
