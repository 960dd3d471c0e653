"""Runs a whole run: folder, settings, model, warm start, training, report.

claim folder -> write config.yaml -> model folder -> warm start (once) -> assemble -> every setting read? -> run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from hone.config import Config, Loaded, count_as_read, plain, require_all_read
from hone.data.stream import make_renderer
from hone.models.image_processor import load_image_processor
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import current_platform
from hone.runtime import ranks
from hone.runtime.watchdog import Watchdog
from hone.tracking.base import RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.metrics import Timer
from hone.tracking.muted import MutedTracking
from hone.tracking.settings import TrackingConfig
from hone.trainers.answering import Answering, Language
from hone.trainers.asking import quiet_place
from hone.trainers.assembly import PolicyAssembly, prepare_process
from hone.trainers.base import Place, Trainer
from hone.trainers.exported_language import write_language
from hone.trainers.folder import claim, write_config
from hone.trainers.own_model import FOLDER, local_model
from hone.trainers.randomness import seed_everything
from hone.trainers.recorder import Recorder
from hone.trainers.settings import (
    CheckpointConfig,
    PolicyRunConfig,
    RunConfig,
    WarmStartConfig,
)
from hone.trainers.supervised_assembly import (
    assemble_preference,
    assemble_reward_model,
    assemble_supervised,
)
from hone.trainers.supervised_settings import (
    PreferenceRunConfig,
    RewardModelRunConfig,
    SupervisedConfig,
    SupervisedRunConfig,
)

S = TypeVar("S", bound=SupervisedConfig)
L = TypeVar("L", bound=Config)

WARM_START = "warm_start"


def run_policy(loaded: Loaded[PolicyRunConfig]) -> Path:
    """Train a policy to the end of its run file, or further from where its folder stands; returns the run folder."""
    config = loaded.config
    folder = Path(config.run.dir)
    with claim(folder), ExitStack() as started:
        changes, model, language = _begin(config, folder)
        recorder = Recorder(Timer())

        def start(model: ModelConfig) -> Answering:
            answering = Answering(config, model, language, recorder)
            started.callback(answering.close)
            return answering

        answering: Answering | None = None
        if config.warm_start is not None:
            supervised = _warm_start(config, config.warm_start, model)
            if (folder / WARM_START / "export" / "config.json").is_file():
                count_as_read(config.warm_start)
            else:
                answering = start(model)
                _require_fitting(loaded, supervised, language, answering)
                _warm_up(supervised, language)
                seed_everything(config.run.seed)  # what follows is the same whether these steps ran now or before
            model = ModelConfig(path=str(folder / WARM_START / "export"), dtype=model.dtype, vision=model.vision)
        with _place(folder, config.run.steps, config.tracking, config, language, recorder) as place:
            _introduce(config, place, changes)
            answering = answering or start(model)
            trainer = PolicyAssembly(config, model, language, place).trainer(answering)
            _require_all_read(loaded)
            trainer.run()
            if ranks.is_first():
                write_language(folder / "export", config, config.data, language.renderer)
    return folder


def run_supervised(loaded: Loaded[SupervisedRunConfig]) -> Path:
    """Fine-tune a model to the end of its run file; returns the run folder."""
    return _run(loaded, assemble_supervised)


def run_preference(loaded: Loaded[PreferenceRunConfig]) -> Path:
    """Train a model on preferences to the end of its run file; returns the run folder."""
    return _run(loaded, assemble_preference)


def run_reward_model(loaded: Loaded[RewardModelRunConfig]) -> Path:
    """Train a reward model to the end of its run file; returns the run folder."""
    return _run(loaded, assemble_reward_model)


def _run(loaded: Loaded[S], assemble: Callable[[S, ModelConfig, Language, Place], Trainer]) -> Path:
    """A run of the supervised family: its parts from `assemble`, the rest is the same for all."""
    config = loaded.config
    folder = Path(config.run.dir)
    with claim(folder):
        changes, model, language = _begin(config, folder)
        with _place(folder, config.run.steps, config.tracking, config, language, Recorder(Timer())) as place:
            _introduce(config, place, changes)
            trainer = assemble(config, model, language, place)
            _require_all_read(loaded)
            trainer.run()
            if ranks.is_first():
                write_language(folder / "export", config, config.data, language.renderer)
    return folder


def _warm_start(config: PolicyRunConfig, warm: WarmStartConfig, model: ModelConfig) -> SupervisedRunConfig:
    """The run of its own in `warm_start/` that the warm start is: done once, continued if it was cut off."""
    return SupervisedRunConfig(
        run=RunConfig(dir=str(Path(config.run.dir) / WARM_START), steps=warm.steps, seed=config.run.seed),
        model=model,
        data=warm.data,
        samples_per_step=warm.samples_per_step,
        engine=warm.engine,
        checkpoint=CheckpointConfig(every_steps=warm.steps, keep=1, keep_best=False),
        tracking=config.tracking,
        runtime=config.runtime,
    )


def _warm_up(supervised: SupervisedRunConfig, language: Language) -> None:
    folder = Path(supervised.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(Timer())
    with _place(folder, supervised.run.steps, supervised.tracking, supervised, language, recorder) as place:
        assemble_supervised(supervised, supervised.model, language, place, "warm_start.data").run()


def _require_fitting(
    loaded: Loaded[PolicyRunConfig], supervised: SupervisedRunConfig, language: Language, answering: Answering
) -> None:
    """Put the whole run together once before its warm start: what does not fit should not be found out after it.

    Its servers and rewards run from now on; the rollout gets its first weights after the warm start.
    """
    config = loaded.config
    place = quiet_place(Path(config.run.dir), language)
    assemble_supervised(supervised, supervised.model, language, place, "warm_start.data")
    PolicyAssembly(config, supervised.model, language, place).put_together(answering)
    if ranks.is_first():
        place.tracking.message(f"{config.kind} run in {place.folder}: {supervised.run.steps} supervised steps first")
    _require_all_read(loaded)
    answering.rollout.make_room()


def _require_all_read(loaded: Loaded[L]) -> None:
    """Raise ConfigError for a setting that no part of the run has read; the first rank has all parts."""
    if ranks.is_first():
        require_all_read(loaded)


@contextmanager
def _place(
    folder: Path,
    steps: int,
    tracking: TrackingConfig,
    config: PolicyRunConfig | SupervisedConfig,
    language: Language,
    recorder: Recorder,
) -> Iterator[Place]:
    """Where a run writes, how it is timed and watched; the trackers are closed however it ends."""
    info = RunInfo(run_dir=folder, total_steps=steps, config=plain(config))
    decode = language.renderer.decode
    kind = Tracking if ranks.is_first() else MutedTracking
    with (
        kind(tracking, info, lambda ids: decode(ids, keep_special=True)) as hub,
        Watchdog(config.runtime.stall_timeout_s) as watchdog,
    ):

        def begins(phase: str) -> None:
            watchdog.begins(phase)
            hub.phase(phase)

        recorder.timer.shown_by(begins)
        yield Place(folder, hub, recorder)


def _begin(config: PolicyRunConfig | SupervisedConfig, folder: Path) -> tuple[list[str], ModelConfig, Language]:
    """Set this process up, and write down settings and model.

    Returns the settings that differ from when the run began, the model in its folder, and its language.
    """
    prepare_process(config.runtime)
    seed_everything(config.run.seed)
    changes = write_config(folder, config) if ranks.is_first() else []
    model = ranks.first_alone(lambda: local_model(config.model, folder / FOLDER))
    renderer = make_renderer(config.data, load_tokenizer(model), load_image_processor(model))
    return changes, model, Language(renderer)


def _introduce(config: PolicyRunConfig | SupervisedConfig, place: Place, changes: list[str]) -> None:
    platform = current_platform()
    place.tracking.message(
        f"{config.kind} run in {place.folder}: {config.run.steps} steps, seed {config.run.seed}, "
        f"on {platform.name} ({platform.device_name()})"
    )
    if changes:
        place.tracking.message(f"settings that differ from when this run began: {', '.join(changes)}")
