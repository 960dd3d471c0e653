"""A finished model that answers: its renderer, and a rollout engine with its weights.

folder --> renderer
       '-> weights, read once --sync--> built-in engine here, or a server such as vLLM --> answers, whole or growing
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hone.config import ConfigError
from hone.data.images import images_in
from hone.data.rendering import Renderer
from hone.engines.settings import EngineConfig
from hone.envs.agents.live import GrowingText, in_pieces
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.platforms.base import compute_dtype, current_platform
from hone.rollout.settings import RolloutConfig
from hone.runtime.settings import RuntimeConfig
from hone.tracking.metrics import Timer
from hone.trainers.policy.checks import context_of, full_context
from hone.trainers.policy.generation import sampling_params
from hone.trainers.run.event_loop import EventLoop
from hone.trainers.run.recorder import Recorder
from hone.trainers.run.roles import place_role, prepare_process
from hone.types import Completion, GenerationRequest, Message, SamplingParams
from hone.weights.settings import WeightSyncConfig
from hone.workers.rollout import RolloutSpec, start_rollout
from hone.workers.rollout_role import RolloutHandle
from hone.workers.train import TrainSpec

LOG = logging.getLogger("hone")
RUN_FILE, EXPORT = "config.yaml", "export"


@dataclass(frozen=True, slots=True)
class Answering:
    """Rollout and sampling of answers, dtype of computation, CPU threads (0: as in `runtime.threads`)."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    threads: int = 0


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """A model with weights that answers until the block of `answering` ends."""

    renderer: Renderer
    rollout: RolloutHandle
    sampling: SamplingParams
    context: int | None = None  # tokens of a prompt with its answer; None: no limit that was not said already
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _shortened: Iterator[int] = field(default_factory=itertools.count)  # answers that have less room

    def request(self, messages: Sequence[Message], seed: int, folder: Path = Path()) -> GenerationRequest:
        """The request for one answer; paths of images begin in `folder`. Raises RenderingError."""
        shown = self.renderer.with_images(messages, folder)
        prompt = self.renderer.render_prompt(shown)
        room = (self.context or 0) - len(prompt)
        if self.context and 0 < room < self.sampling.max_tokens and not next(self._shortened):
            LOG.warning(
                "a prompt of %d tokens leaves %d of max_response_tokens=%d, as the model's context is %d: its answer "
                "may end earlier, and so may those to other long prompts",
                *(len(prompt), room, self.sampling.max_tokens, self.context),
            )
        return GenerationRequest(
            f"answer/{next(self._numbers)}", prompt, replace(self.sampling, seed=seed), images_in(shown)
        )

    async def whole(self, request: GenerationRequest) -> Completion:
        """The whole answer."""
        return await self.rollout.generate(request)

    async def growing(self, request: GenerationRequest) -> AsyncIterator[str]:
        """The answer's text in parts, as it is sampled."""
        text = GrowingText(self.renderer.decode)
        async for so_far in in_pieces(self.rollout.generate, request):
            if more := text.grown(so_far):
                yield more


@contextmanager
def answering(model: ModelConfig, how: Answering, loop: EventLoop) -> Iterator[AnsweringModel]:
    """A model that answers within the block, on `loop`. Raises ModelError, ConfigError and ServerFailed."""
    runtime = RuntimeConfig(threads=how.threads)
    prepare_process(runtime)
    renderer = Renderer(load_tokenizer(model), image_reader=load_image_processor(model))
    if full := full_context(how.rollout.sampling, model):
        LOG.warning("%s, or answers end earlier", full)
    recorder = Recorder(Timer())
    with TemporaryDirectory(prefix="hone-answers-") as folder:
        dtype = compute_dtype(how.engine.compute_dtype, current_platform())
        spec = RolloutSpec(how.rollout, WeightSyncConfig(), model, dtype, renderer.tokenizer, Path(folder))
        rollout = start_rollout(spec, loop, recorder.phase)
        try:
            policy = place_role("policy", TrainSpec(model, how.engine), runtime, recorder)
            rollout.sync_from(policy, version=0)
            context = None if full else context_of(model)
            yield AnsweringModel(renderer, rollout, sampling_params(renderer, how.rollout.sampling), context)
        finally:
            rollout.close()


def finished_model(name: str) -> ModelConfig:
    """The model that a command names: a model folder, GGUF file or hub name, or the export of a run's folder.

    Raises ConfigError for a run without an export, or whose export is an adapter alone (a service's).
    """
    folder = Path(name).expanduser()
    if not (folder / RUN_FILE).is_file():
        return ModelConfig(path=name)
    if (folder / EXPORT / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} was trained on a service, so its export is an adapter without its base model: write both as one "
            f"model with `hone export --merge {folder} FOLDER`, and give FOLDER"
        )
    if not (folder / EXPORT / "config.json").is_file():
        raise ConfigError(f"{folder} has no export yet: let its run end, or write one: hone export {folder} FOLDER")
    return ModelConfig(path=str(folder / EXPORT))


def name_of(model: ModelConfig, *taken: str) -> str:
    """A short name of a model for people: its folder's, or for the export of a run the run's; unlike those `taken`."""
    path = Path(str(model.path))
    short = (path.parent.name if path.name == EXPORT else path.name) or str(path)
    numbered = (f"{short} ({number})" for number in itertools.count(2))
    return next(name for name in itertools.chain((short, str(path)), numbered) if name not in taken)
