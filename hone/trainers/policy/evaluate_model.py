"""Runs a model without training it: `hone eval`, `hone generate` and `hone rollout serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hone.data.images import images_in
from hone.data.rendering import Renderer
from hone.data.settings import PromptSetConfig
from hone.data.stream import make_renderer
from hone.engines.settings import EngineConfig
from hone.envs.episode import request_seed
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.platforms.base import compute_dtype, current_platform
from hone.rollout.settings import RolloutConfig
from hone.runtime import ranks
from hone.runtime.settings import RuntimeConfig
from hone.tracking.base import RunInfo
from hone.tracking.metrics import Timer
from hone.tracking.muted import MutedTracking
from hone.tracking.settings import TrackingConfig
from hone.trainers.policy.generation import Generation, agents_adapters, rollout_spec, sampling_params
from hone.trainers.policy.settings import EvaluationSamplingConfig, PolicyEvaluationConfig, PolicyRunConfig
from hone.trainers.run.context import RunContext, untracked_context
from hone.trainers.run.event_loop import EventLoop
from hone.trainers.run.recorder import Recorder
from hone.trainers.run.roles import frozen_engine, place_role, prepare_process
from hone.trainers.run.run_model import FOLDER, local_model
from hone.types import GenerationRequest, Message, TrajectoryGroup
from hone.weights.settings import WeightSyncConfig
from hone.workers.publication import RolloutHandle
from hone.workers.rollout import RolloutSpec, serve_rollout, start_rollout
from hone.workers.train import TrainSpec


def evaluate_model(
    config: PolicyRunConfig, model: ModelConfig, adapters: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Measure one model on the evaluation sets of a run file; metrics are named `eval/<set>/...`.

    `adapters`: LoRA adapters of that model (name -> folder), evaluated too, as `eval/<name>/<set>/...`.
    """
    ranks.require_one("hone eval")
    with _answering(config, model, adapters or {}) as (generation, context):
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
    chosen = EvaluationSamplingConfig(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
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
    config: PolicyRunConfig, model: ModelConfig, adapters: Mapping[str, str]
) -> Iterator[tuple[Generation, RunContext]]:
    """The generation of a run file with the weights of a model, and a context that writes nothing."""
    prepare_process(config.runtime)
    renderer = make_renderer(config.data, load_tokenizer(model), load_image_processor(model))
    context = untracked_context(Path(config.run.dir), renderer)
    generation = Generation(config, model, renderer, context.recorder, adapters=adapters)
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


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Conversations that each get `samples` answers, and how they are sampled."""

    conversations: Sequence[Sequence[Message]]
    rollout: RolloutConfig
    samples: int = 1
    seed: int = 0
    folder: Path = Path()  # where paths of images begin


def generate_answers(model: ModelConfig, request: AnswerRequest, engine: EngineConfig) -> list[list[str]]:
    """The decoded answers to each conversation, in order; `engine` says how the model is computed."""
    runtime = RuntimeConfig()
    prepare_process(runtime)
    renderer = Renderer(load_tokenizer(model), image_reader=load_image_processor(model))
    recorder = Recorder(Timer())
    loop = EventLoop()
    try:
        with TemporaryDirectory(prefix="hone-generate-") as folder:
            dtype = compute_dtype(engine.compute_dtype, current_platform())
            spec = RolloutSpec(request.rollout, WeightSyncConfig(), model, dtype, renderer.tokenizer, Path(folder))
            rollout = start_rollout(spec, loop, recorder.phase)
            try:
                policy = place_role("policy", TrainSpec(model, engine), runtime, recorder)
                rollout.sync_from(policy, version=0)
                return loop.run(_generate(rollout, renderer, request))
            finally:
                rollout.close()
    finally:
        loop.close()


async def _generate(rollout: RolloutHandle, renderer: Renderer, request: AnswerRequest) -> list[list[str]]:
    sampling = sampling_params(renderer, request.rollout.sampling)

    async def one(number: int, sample: int) -> str:
        seed = request_seed(request.seed, 0, number, sample, 0)
        messages = renderer.with_images(request.conversations[number], request.folder)
        prompt = renderer.render_prompt(messages)
        own = replace(sampling, seed=seed)
        completion = await rollout.generate(GenerationRequest(f"{number}/{sample}", prompt, own, images_in(messages)))
        return renderer.decode(completion.token_ids)

    answers = [
        asyncio.gather(*(one(number, sample) for sample in range(request.samples)))
        for number in range(len(request.conversations))
    ]
    return [list(one) for one in await asyncio.gather(*answers)]


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
