"""Asks a model without training it: what `hone eval` and `hone generate` are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hone.data.images import images_in
from hone.data.rendering import Renderer
from hone.data.stream import make_renderer
from hone.engines.settings import EngineConfig
from hone.envs.episode import request_seed
from hone.models.image_processor import load_image_processor
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.rollout.settings import RolloutConfig
from hone.runtime.settings import RuntimeConfig
from hone.tracking.base import RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.metrics import Timer
from hone.tracking.settings import TrackingConfig
from hone.trainers.answering import Answering, Language, place_role
from hone.trainers.assembly import prepare_process
from hone.trainers.base import Place
from hone.trainers.loop import EventLoop
from hone.trainers.recorder import Recorder
from hone.trainers.reference import only_asked
from hone.trainers.settings import PolicyRunConfig
from hone.types import Message
from hone.weights.settings import WeightSyncConfig
from hone.workers.handles import RolloutHandle
from hone.workers.rollout import RolloutSpec, start_rollout
from hone.workers.train import TrainSpec


def evaluate_model(
    config: PolicyRunConfig, model: ModelConfig, adapters: Mapping[str, str] | None = None
) -> dict[str, float]:
    """The figures of a run file's evaluation sets for one model, under `eval/<set>/`.

    `adapters`: LoRA adapters of that model (name -> folder), served beside it; theirs are under `eval/<name>/<set>/`.
    """
    prepare_process(config.runtime)
    language = Language(make_renderer(config.data, load_tokenizer(model), load_image_processor(model)))
    place = quiet_place(Path(config.run.dir), language)
    answering = Answering(config, model, language, place.recorder, beside=adapters or {})
    try:
        policy = place_role(
            "policy", TrainSpec(model, only_asked(config.actor.alone())), config.runtime, place.recorder
        )
        answering.rollout.sync_from(policy, version=0)
        figures = answering.evaluator(place.tracking).run(step=0)
        for name in adapters or {}:
            found = answering.evaluator(place.tracking, name).run(step=0)
            figures |= {figure.replace("eval/", f"eval/{name}/", 1): value for figure, value in found.items()}
        return figures
    finally:
        answering.close()


@dataclass(frozen=True, slots=True)
class Questions:
    """What to ask, and how: conversations that each want `samples` answers."""

    conversations: Sequence[Sequence[Message]]
    rollout: RolloutConfig
    samples: int = 1
    seed: int = 0
    folder: Path = Path()  # where paths of images begin


def generate_answers(model: ModelConfig, questions: Questions, compute_dtype: str) -> list[list[str]]:
    """The decoded answers to each conversation, in order."""
    runtime = RuntimeConfig()
    prepare_process(runtime)
    renderer = Renderer(load_tokenizer(model), image_reader=load_image_processor(model))
    recorder = Recorder(Timer())
    loop = EventLoop()
    try:
        with TemporaryDirectory(prefix="hone-generate-") as folder:
            asked = RolloutSpec(
                questions.rollout, WeightSyncConfig(), model, compute_dtype, renderer.tokenizer, Path(folder)
            )
            rollout = start_rollout(asked, loop.run, recorder.phase)
            try:
                spec = TrainSpec(model, EngineConfig(compute_dtype=compute_dtype))
                rollout.sync_from(place_role("policy", spec, runtime, recorder), version=0)
                return loop.run(_ask(rollout, renderer, questions))
            finally:
                rollout.close()
    finally:
        loop.close()


async def _ask(rollout: RolloutHandle, renderer: Renderer, questions: Questions) -> list[list[str]]:
    sampling = Language(renderer).sampling(questions.rollout.sampling)

    async def one(number: int, sample: int) -> str:
        seed = request_seed(questions.seed, 0, number, sample, 0)
        messages = renderer.with_images(questions.conversations[number], questions.folder)
        prompt = renderer.render_prompt(messages)
        asked = replace(sampling, seed=seed)
        completion = await rollout.generate(f"{number}/{sample}", prompt, asked, images_in(messages))
        return renderer.decode(completion.token_ids)

    asked = [
        asyncio.gather(*(one(number, sample) for sample in range(questions.samples)))
        for number in range(len(questions.conversations))
    ]
    return [list(answers) for answers in await asyncio.gather(*asked)]


def quiet_place(folder: Path, language: Language) -> Place:
    """A place without trackers: nothing is written, messages go to standard error."""
    decode = language.renderer.decode
    hub = Tracking(TrackingConfig(trackers=()), RunInfo(run_dir=folder), lambda ids: decode(ids, keep_special=True))
    return Place(folder, hub, Recorder(Timer()))
