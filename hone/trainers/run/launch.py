"""Runs a whole run: folder, settings, model, warm start, training, report.

claim folder -> check settings -> write config.yaml -> model folder -> warm start (once) -> assemble -> all keys read?
-> servers -> run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from hone.config import ConfigError, Loaded, count_as_read, plain, require_all_read
from hone.config_errors import with_preset
from hone.data.counting import count_items
from hone.data.rendering import Renderer
from hone.data.stream import PromptMaker, make_renderer
from hone.engines.settings import EngineConfig
from hone.full_disk import until_room
from hone.models.loading import DTYPES
from hone.models.numerics.products import CHOICE_FILE, described, settle
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.platforms.base import compute_dtype, current_platform, why_compute_dtype, why_no_triton
from hone.processes.closing import ends_within
from hone.runtime import ranks
from hone.runtime.watchdog import Watchdog
from hone.tracking.base import RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.metrics import Timer
from hone.tracking.muted import MutedTracking
from hone.trainers.exports.card import write_card
from hone.trainers.exports.rendering import write_rendering
from hone.trainers.forecast.record import Peaks, foretell
from hone.trainers.policy.assembly import PolicyAssembly
from hone.trainers.policy.checks import check_replay, check_room, check_settings
from hone.trainers.policy.generation import Generation, has_servers
from hone.trainers.policy.settings import DistillRunConfig, PolicyRunConfig, WarmStartConfig
from hone.trainers.run.context import RunContext, RunControl, Stopping, untracked_context
from hone.trainers.run.folder import claim, write_config
from hone.trainers.run.loop import Trainer
from hone.trainers.run.profiler import Profiler
from hone.trainers.run.randomness import seed_everything
from hone.trainers.run.recorder import Recorder
from hone.trainers.run.roles import lost_updates, prepare_process
from hone.trainers.run.run_model import FOLDER, local_model
from hone.trainers.run.settings import CheckpointConfig, RunConfig, StopWhenConfig
from hone.trainers.supervised.assembly import (
    assemble_preference,
    assemble_reward_model,
    assemble_supervised,
    check_reference,
    with_steps,
)
from hone.trainers.supervised.settings import (
    PreferenceRunConfig,
    RewardModelRunConfig,
    SupervisedConfig,
    SupervisedRunConfig,
)
from hone.workers.shared_memory import require_room

S = TypeVar("S", bound=SupervisedConfig)

WARM_START = "warm_start"
CLOSE_S = 180.0  # for servers, reward processes, environments and the event loop together
BLOCKED_S = 10.0  # for the same where foreign code blocks the event loop, on which they would be closed
READ_BY_SERVERS = ("rollout", "weights")  # sections whose keys servers read when they start


def run_policy(loaded: Loaded[PolicyRunConfig], control: RunControl | None = None) -> Path:
    """Train a policy until `run.steps`, from the newest checkpoint if there is one; returns the run folder."""
    control = control or RunControl()
    config = loaded.config
    ranks.require_one("hone distill" if isinstance(config, DistillRunConfig) else "hone train")
    folder = Path(config.run.dir)
    if control.replay is not None:
        check_replay(config, control.replay)
    with claim(folder), ExitStack() as started:
        _check(config, loaded)
        changes, model, renderer = _begin(config, folder)
        check_room(config, model)
        if config.run.epochs is not None:
            config = _with_steps(config, renderer)
            _check(config, loaded)
        predicted = foretell(config, model, folder)
        recorder = Recorder(Timer(), config.run.stops.skipped_steps)

        def prepared(model: ModelConfig) -> Generation:
            generation = Generation(config, model, renderer, recorder)
            started.callback(_close, generation)
            return generation

        generation: Generation | None = None
        if config.warm_start is not None:
            supervised = _warm_start(config, config.warm_start, model)
            if (folder / WARM_START / "export" / "config.json").is_file():
                count_as_read(config.warm_start)
            else:
                generation = prepared(model)
                _check_whole_run(config, supervised, renderer, generation)
                _require_read_before_servers(loaded)
                generation.start()
                require_all_read(loaded)
                generation.rollout.make_room()
                _warm_up(supervised, renderer, RunControl(stop=control.stop))
                seed_everything(config.run.seed)  # what follows is the same whether these steps ran now or before
            model = model.at(folder / WARM_START / "export")
        with _run_context(config, renderer, recorder, control) as context:
            _introduce(config, context, changes)
            context.tracking.message(predicted)
            generation = generation or prepared(model)
            trainer = PolicyAssembly(config, model, renderer, context, generation).build()
            _prepare_end(trainer, config, renderer)
            _require_read_before_servers(loaded)
            trainer.actor.release_memory()  # for servers on the devices of its ranks
            require_room(trainer.actor, trainer.trained_roles(), generation.rollout)
            generation.start()
            generation.rollout.sync_from(trainer.actor, version=0)
            require_all_read(loaded)
            trainer.run()
    return folder


def _close(generation: Generation) -> None:
    """Close a generation within one deadline for all of it: what hangs, such as foreign code, is left to the exit."""
    with ends_within(CLOSE_S if generation.loop.responds else BLOCKED_S, "closing the run"):
        generation.close()


def run_supervised(loaded: Loaded[SupervisedRunConfig], control: RunControl | None = None) -> Path:
    """Fine-tune a model to the end of its run file; returns the run folder."""
    return _run(loaded, assemble_supervised, control or RunControl())


def run_preference(loaded: Loaded[PreferenceRunConfig], control: RunControl | None = None) -> Path:
    """Train a model on preferences to the end of its run file; returns the run folder."""
    check_reference(loaded.config)
    return _run(loaded, assemble_preference, control or RunControl())


def run_reward_model(loaded: Loaded[RewardModelRunConfig], control: RunControl | None = None) -> Path:
    """Train a reward model to the end of its run file; returns the run folder."""
    return _run(loaded, assemble_reward_model, control or RunControl())


def _run(
    loaded: Loaded[S], assemble: Callable[[S, ModelConfig, Renderer, RunContext], Trainer], control: RunControl
) -> Path:
    """A run of the supervised family: its parts from `assemble`, the rest is the same for all."""
    config = loaded.config
    folder = Path(config.run.dir)
    with claim(folder):
        changes, model, renderer = _begin(config, folder)
        config = with_steps(config, renderer)
        predicted = foretell(config, model, folder)
        recorder = Recorder(Timer(), config.run.stops.skipped_steps)
        with _run_context(config, renderer, recorder, control) as context:
            _introduce(config, context, changes)
            context.tracking.message(predicted)
            trainer = assemble(config, model, renderer, context)
            _prepare_end(trainer, config, renderer)
            if ranks.is_first():  # the trackers' settings are read by its trackers only
                require_all_read(loaded)
            trainer.run()
    return folder


def _prepare_end(trainer: Trainer, config: PolicyRunConfig | SupervisedConfig, renderer: Renderer) -> None:
    """Measure the run's peak of memory, and complete its export with chat template, rendering and model card."""

    def complete(export: Path) -> None:
        until_room(lambda: write_rendering(export, config, config.data, renderer))
        until_room(lambda: write_card(export, trainer.folder, config, trainer.steps))

    trainer.watchers.append(Peaks(trainer.changing_roles, trainer.folder))
    trainer.complete_export = complete


def _check(config: PolicyRunConfig, loaded: Loaded[PolicyRunConfig]) -> None:
    try:
        check_settings(config)
    except ConfigError as error:
        found = with_preset(str(error), loaded.provenance)
        if found == str(error):
            raise
        raise ConfigError(found) from error


def _require_read_before_servers(loaded: Loaded[PolicyRunConfig]) -> None:
    """Find keys that nothing uses before a server takes its time to start; its own keys are looked at afterwards."""
    if has_servers(loaded.config.rollout):
        require_all_read(loaded, later=READ_BY_SERVERS)


def _with_steps(config: PolicyRunConfig, renderer: Renderer) -> PolicyRunConfig:
    """The settings with `run.steps`, counted from the training prompts."""
    prompts = count_items(PromptMaker, config.data, renderer, lambda one: one.max_prompt_tokens is not None)
    return config.model_copy(update={"run": config.run.counted(prompts, config.update.prompts_per_step)})


def _warm_start(config: PolicyRunConfig, warm: WarmStartConfig, model: ModelConfig) -> SupervisedRunConfig:
    """Run the warm start in `warm_start/`: once, and continue it if it was interrupted."""
    return SupervisedRunConfig(
        run=RunConfig(
            dir=str(Path(config.run.dir) / WARM_START),
            steps=warm.steps,
            seed=config.run.seed,
            stop_when=StopWhenConfig(skipped_steps=config.run.stops.skipped_steps),
        ),
        model=model,
        data=warm.data,
        samples_per_step=warm.samples_per_step,
        actor=warm.actor,
        checkpoint=CheckpointConfig(every_steps=warm.steps, keep=1, keep_best=False),
        tracking=config.tracking,
        runtime=config.runtime,
    )


def _warm_up(supervised: SupervisedRunConfig, renderer: Renderer, control: RunControl) -> None:
    folder = Path(supervised.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(Timer(), supervised.run.stops.skipped_steps)
    with _run_context(supervised, renderer, recorder, control) as context:
        assemble_supervised(supervised, supervised.model, renderer, context, "warm_start.data").run()


def _check_whole_run(
    config: PolicyRunConfig, supervised: SupervisedRunConfig, renderer: Renderer, generation: Generation
) -> None:
    """Assemble the whole run once before its warm start, so that a wrong setting is found before the warm start.

    Servers and reward processes stay up; the rollout gets its first weights after the warm start.
    """
    context = untracked_context(Path(config.run.dir), renderer)
    assemble_supervised(supervised, supervised.model, renderer, context, "warm_start.data")
    PolicyAssembly(config, supervised.model, renderer, context, generation).build()
    context.tracking.message(f"{config.kind} run in {context.folder}: {supervised.run.steps} supervised steps first")
    for later in (*config.tracking.trackers, config.profile):
        if later is not None:
            count_as_read(later)


@contextmanager
def _run_context(
    config: PolicyRunConfig | SupervisedConfig, renderer: Renderer, recorder: Recorder, control: RunControl
) -> Iterator[RunContext]:
    """Open the context of a run: files, timings and trackers; the trackers are closed however it ends."""
    _check_stopping(config)
    folder = Path(config.run.dir)
    info = RunInfo(run_dir=folder, total_steps=config.run.steps, config=plain(config))
    kind = Tracking if ranks.is_first() else MutedTracking
    decode = partial(renderer.decode, keep_special=True) if isinstance(config, PolicyRunConfig) else None
    with (
        kind(config.tracking, info, decode) as hub,
        Watchdog(config.runtime.stall_timeout_s) as watchdog,
    ):
        recorder.timer.shown_by(watchdog.begins, hub.phase)
        profiler = Profiler(config.profile, config.run.steps, config.runtime, folder, hub)
        yield RunContext(folder, hub, recorder, profiler, control, Stopping.of(config.run.stops))


def _check_stopping(config: PolicyRunConfig | SupervisedConfig) -> None:
    """Raise ConfigError for a rule that could never end the run, because nothing has a score between its steps."""
    if not config.run.stops.by_score:
        return
    key = "run.stop_when ends a run by the score of its held-out sets"
    if not config.evaluation.sets or not config.evaluation.every_steps:
        raise ConfigError(f"{key}: set evaluation.sets and evaluation.every_steps, or remove it")
    reference = getattr(config, "reference", None)
    if isinstance(config, PreferenceRunConfig) and reference is not None and reference.follow is not None:
        raise ConfigError(f"{key}, and losses against a reference that follows cannot be compared; remove it")


def _begin(config: PolicyRunConfig | SupervisedConfig, folder: Path) -> tuple[list[str], ModelConfig, Renderer]:
    """Set this process up, and write down settings and model.

    Returns the settings that differ from the last launch, the model in its folder, and its renderer.
    """
    prepare_process(config.runtime)
    if "sets" in config.evaluation.model_fields_set and not config.evaluation.sets:
        count_as_read(config.evaluation)  # `evaluation.sets={}` switches evaluation off, with all that says how it goes
    seed_everything(config.run.seed)
    changes = write_config(folder, config, config.run.steps) if ranks.is_first() else []
    ranks.first_alone(lambda: settle(folder / CHOICE_FILE, current_platform().device))
    model = ranks.first_alone(lambda: local_model(config.model, folder / FOLDER))
    renderer = make_renderer(config.data, load_tokenizer(model), load_image_processor(model))
    return changes, model, renderer


def _trained(config: PolicyRunConfig | SupervisedConfig) -> Iterator[tuple[ModelConfig, EngineConfig]]:
    """The models that a run trains."""
    yield config.model, config.actor
    if isinstance(config, PolicyRunConfig):
        if config.critic is not None:
            yield config.critic.model or config.model, config.critic.engine
        if config.process_reward is not None:
            yield config.process_reward.model or config.model, config.process_reward.engine


def _introduce(config: PolicyRunConfig | SupervisedConfig, context: RunContext, changes: list[str]) -> None:
    platform, chosen = current_platform(), config.actor.compute_dtype
    context.tracking.message(
        f"{config.kind} run in {context.folder}: {config.run.steps} steps, seed {config.run.seed}, "
        f"on {platform.name} ({platform.device_name()}), computed in {compute_dtype(chosen, platform)} "
        f"({why_compute_dtype(chosen, platform)})"
    )
    if platform.device == "cpu":
        context.tracking.message(f"matrix products by {described(DTYPES[compute_dtype(chosen, platform)])}")
    else:
        reason = why_no_triton(platform)
        by = f"PyTorch's operations ({reason})" if reason else "a Triton kernel"
        context.tracking.message(f"log-probs and entropy are computed from logits by {by}")
    slow = platform.why_bfloat16_is_slow()
    if slow and chosen == "bfloat16":
        context.tracking.message(f"{slow}: actor.compute_dtype=float32 is faster here")
    for model, engine in _trained(config):
        if warning := lost_updates(model, engine):
            context.tracking.message(warning)
    if changes:
        context.tracking.message(f"settings that differ from before: {', '.join(changes)}")
