"""Runs a whole run: folder, settings, model, warm start, training, report.

claim folder -> write config.yaml -> model folder -> warm start (once) -> assemble -> every setting read? -> run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hone.config import Config, ConfigError, Loaded, count_as_read, plain, require_all_read
from hone.data.stream import make_renderer
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import current_platform
from hone.runtime import ranks
from hone.tracking.base import RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.metrics import Timer
from hone.tracking.muted import MutedTracking
from hone.tracking.settings import TrackingConfig
from hone.trainers.answering import Answering, Language
from hone.trainers.asking import quiet_place
from hone.trainers.assembly import PolicyAssembly, local_model, prepare_process
from hone.trainers.base import Place, Trainer
from hone.trainers.exported_language import write_language
from hone.trainers.folder import claim, write_config
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

WARM_START = "warm_start"


def run_policy(loaded: Loaded[PolicyRunConfig]) -> Path:
    """Train a policy to the end of its run file, or further from where its folder stands; returns the run folder.

    Raises ConfigError under torchrun: every rank would generate the same answers.
    """
    config = loaded.config
    if ranks.ranks() > 1:
        raise ConfigError(
            f"runtime: a {config.kind} run was started on {ranks.ranks()} ranks, but the local runtime trains policies "
            "in one process; start it without torchrun (sft, prefer and reward-model run on many ranks)"
        )
    folder = Path(config.run.dir)
    with claim(folder):
        changes, model, language = _begin(config, folder)
        if config.warm_start is not None:
            model = _warm_started(loaded, config.warm_start, model, language)
        with _place(folder, config.run.steps, config.tracking, config, language) as place:
            _introduce(config, place, changes)
            answering = Answering(config, model, language, place)
            try:
                trainer = PolicyAssembly(config, model, language, place).trainer(answering)
                require_all_read(loaded)
                trainer.run()
                write_language(folder / "export", config, config.data, language.renderer)
            finally:
                answering.close()
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
        with _place(folder, config.run.steps, config.tracking, config, language) as place:
            _introduce(config, place, changes)
            trainer = assemble(config, model, language, place)
            require_all_read(loaded)
            trainer.run()
            if ranks.is_first():
                write_language(folder / "export", config, config.data, language.renderer)
    return folder


def _warm_started(
    loaded: Loaded[PolicyRunConfig], warm: WarmStartConfig, model: ModelConfig, language: Language
) -> ModelConfig:
    """The model after its supervised steps: a run of its own in `warm_start/`, done once, continued if it was cut."""
    config = loaded.config
    folder = Path(config.run.dir) / WARM_START
    supervised = SupervisedRunConfig(
        run=RunConfig(dir=str(folder), steps=warm.steps, seed=config.run.seed),
        model=model,
        data=warm.data,
        samples_per_step=warm.samples_per_step,
        engine=warm.engine,
        checkpoint=CheckpointConfig(every_steps=warm.steps, keep=1, keep_best=False),
        tracking=config.tracking,
        runtime=config.runtime,
    )
    export = folder / "export"
    if (export / "config.json").is_file():
        count_as_read(warm)
    else:
        _require_fitting(loaded, supervised, language)
        folder.mkdir(parents=True, exist_ok=True)
        with _place(folder, warm.steps, config.tracking, supervised, language) as place:
            assemble_supervised(supervised, model, language, place, "warm_start.data").run()
        seed_everything(config.run.seed)  # what follows is the same whether these steps ran now or before
    return ModelConfig(path=str(export), dtype=config.model.dtype)


def _require_fitting(loaded: Loaded[PolicyRunConfig], supervised: SupervisedRunConfig, language: Language) -> None:
    """Put the whole run together once before its warm start: what does not fit should not be found out after it."""
    config = loaded.config
    place = quiet_place(Path(config.run.dir), language)
    assemble_supervised(supervised, supervised.model, language, place, "warm_start.data")
    answering = Answering(config, supervised.model, language, place)
    try:
        PolicyAssembly(config, supervised.model, language, place).trainer(answering)
        place.tracking.message(f"{config.kind} run in {place.folder}: {supervised.run.steps} supervised steps first")
        require_all_read(loaded)
    finally:
        answering.close()


@contextmanager
def _place(folder: Path, steps: int, tracking: TrackingConfig, config: Config, language: Language) -> Iterator[Place]:
    """Where a run writes and how it is timed; the trackers are closed however it ends."""
    info = RunInfo(run_dir=folder, total_steps=steps, config=plain(config))
    decode = language.renderer.decode
    kind = Tracking if ranks.is_first() else MutedTracking
    with kind(tracking, info, lambda ids: decode(ids, keep_special=True)) as hub:
        yield Place(folder, hub, Recorder(Timer(hub.phase)))


def _begin(config: PolicyRunConfig | SupervisedConfig, folder: Path) -> tuple[list[str], ModelConfig, Language]:
    """Set this process up, and write down settings and model.

    Returns the settings that differ from when the run began, the model in its folder, and its language.
    """
    prepare_process(config.runtime)
    seed_everything(config.run.seed)
    changes = write_config(folder, config) if ranks.is_first() else []
    model = ranks.first_alone(lambda: local_model(config.model, folder / "model"))
    return changes, model, Language(make_renderer(config.data, load_tokenizer(model)))


def _introduce(config: PolicyRunConfig | SupervisedConfig, place: Place, changes: list[str]) -> None:
    platform = current_platform()
    place.tracking.message(
        f"{config.kind} run in {place.folder}: {config.run.steps} steps, seed {config.run.seed}, "
        f"on {platform.name} ({platform.device_name()})"
    )
    if changes:
        place.tracking.message(f"settings that differ from when this run began: {', '.join(changes)}")
