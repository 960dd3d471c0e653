"""Exports: the weights of a run's checkpoint as a folder that transformers or, for an adapter, PEFT loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from hone.config import Config as Settings
from hone.config import ConfigError, build
from hone.data.stream import make_renderer
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.building import into_place
from hone.models.errors import ModelError
from hone.models.loading import folder_of
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.models.value_head import check_classifier, to_classifier
from hone.models.vision.image_processor import load_image_processor
from hone.trainers.exports.card import write_card
from hone.trainers.exports.rendering import write_rendering
from hone.trainers.policy.settings import DistillRunConfig, PolicyRunConfig
from hone.trainers.run.checkpoints import Checkpoint, CheckpointStore
from hone.trainers.run.launch import WARM_START
from hone.trainers.run.run_model import recorded_model
from hone.trainers.supervised.settings import (
    PreferenceRunConfig,
    RewardModelRunConfig,
    SupervisedConfig,
    SupervisedRunConfig,
)
from hone.workers.train import TrainSpec, TrainWorker


def read_run(folder: Path) -> PolicyRunConfig | SupervisedConfig:
    """The settings of the run in `folder`. Raises ConfigError if there is no run."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    kinds: dict[str, type[Settings]] = {
        "rl": PolicyRunConfig,
        "distill": DistillRunConfig,
        "sft": SupervisedRunConfig,
        "prefer": PreferenceRunConfig,
        "reward_model": RewardModelRunConfig,
    }
    return build(kinds[data.get("kind", "rl")], data, str(path))  # type: ignore[return-value]


def base_model(folder: Path, config: PolicyRunConfig | SupervisedConfig) -> ModelConfig:
    """The folder whose architecture and tokenizer the run's weights have (a LoRA adapter is separate)."""
    model = recorded_model(config.model, folder)
    if isinstance(config, PolicyRunConfig) and config.warm_start is not None:
        return model.at(folder / WARM_START / "export")
    return model


def choose(folder: Path, which: str) -> Checkpoint:
    """The checkpoint that `latest`, `best` or a step number names. Raises ConfigError listing what there is."""
    store = CheckpointStore(folder / "checkpoints", keep=1)
    latest = store.latest()
    if latest is None:
        raise ConfigError(f"{folder} has no checkpoint yet")
    if which == "latest":
        return latest
    chosen = store.best() if which == "best" else folder / "checkpoints" / f"step_{int(which):08d}"
    if chosen is None or not chosen.is_dir():
        there = ", ".join(sorted(f.name for f in (folder / "checkpoints").glob("step_*")))
        raise ConfigError(f"{folder} has no checkpoint {which!r} (there is: {there})")
    return store.read(chosen)


def export_checkpoint(
    folder: Path, output: Path, which: str = "latest", merge: bool = False, classifier: bool = False
) -> Path:
    """Write a checkpoint's policy to `output`, which must not exist yet; returns the checkpoint's folder.

    Of a LoRA run that is the adapter alone, or with `merge` the whole model. A reward model becomes a `classifier` of
    transformers with `classifier=True`, which includes its adapter.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already; name a new folder")
    above = next(one for one in output.absolute().parents if one.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(f"{output} cannot be made, because {above} is no folder that can be written to; name another")
    if which not in ("latest", "best") and not which.isdecimal():
        raise ConfigError(f"--checkpoint should be latest, best or a step number, found {which!r}")
    config = read_run(folder)
    checkpoint = choose(folder, which)
    if merge and config.actor.lora is None:
        raise ConfigError(f"--merge: the run in {folder} trained all weights, so there is no adapter to merge")
    if classifier and not (isinstance(config, RewardModelRunConfig) and config.loss.name == "bradley_terry"):
        raise ConfigError(
            f"--classifier: the run in {folder} trained no model that scores a whole answer (hone reward-model with "
            "loss bradley_terry)"
        )
    model_type = "value_model" if isinstance(config, RewardModelRunConfig) else "language_model"
    model = base_model(folder, config)
    if classifier:
        try:
            check_classifier(folder_of(model))
        except ModelError as error:
            raise ConfigError(f"--classifier: the run in {folder} cannot become one: {error}") from error
    worker = TrainWorker(TrainSpec(model, config.actor.alone(), model_type, total_steps=config.run.steps or 1))
    worker.initialize()
    worker.engine.load_checkpoint(checkpoint.part("actor"))
    tokenizer = load_tokenizer(model)
    renderer = make_renderer(config.data, tokenizer, load_image_processor(model))
    with _written(output, checkpoint) as partial:
        if merge and not config.actor.backend.computes_here:
            _merge_adapter_of_service(worker, model, config.actor, partial)
        elif config.actor.lora is None or merge or classifier:
            worker.engine.export_hf(partial)
        else:
            worker.engine.export_adapter(partial)
        write_rendering(partial, config, config.data, renderer)
        write_card(partial, folder, config, checkpoint.step)
        if classifier:
            pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            to_classifier(partial, pad)
            renderer.save_endless_template(partial)
    return checkpoint.folder


@contextmanager
def _written(output: Path, checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder for an export, which is put into place at the end.

    Raises ConfigError if the disk does not take it. An error of a file elsewhere, such as the base model's, is raised.
    """
    try:
        with into_place(output) as partial:
            yield partial
    except (ConnectionError, TimeoutError):  # of a service
        raise
    except OSError as error:
        if not _is_of(error, output.resolve()):
            raise
        reason = error.strerror or str(error)
        why = reason if error.filename is None else f"{reason}: {error.filename}"
        left = "has its old files" if output.exists() else "is not there"
        todo = "wait for it" if isinstance(error, BlockingIOError) else "make room"
        raise ConfigError(
            f"{output} cannot be written ({why}) and {left}; {checkpoint.folder} is "
            f"unchanged: {todo}, or name another folder"
        ) from error


def _is_of(error: OSError, output: Path) -> bool:
    """Tell whether an error is of `output`: it names no file (a full disk), or one in a folder above or made for it."""
    if not isinstance(error.filename, str | bytes):
        return True
    path = Path(os.fsdecode(error.filename)).resolve()
    return output.is_relative_to(path) or str(path).startswith(str(output.with_name(f".{output.name}.")))


def _merge_adapter_of_service(worker: TrainWorker, model: ModelConfig, actor: EngineConfig, folder: Path) -> None:
    """Fetch a service's adapter, and merge it into the base model, which an engine of this process loads.

    Raises ConfigError if the weights of the base model are not here, or the adapter does not fit them.
    """
    folder.mkdir(parents=True)
    with TemporaryDirectory(prefix="adapter-", dir=folder) as name:  # goes with `folder` if this process is killed
        worker.engine.export_adapter(Path(name))
        here = EngineConfig(compute_dtype=actor.compute_dtype, lora=LoraConfig(path=name))
        merging = TrainWorker(TrainSpec(model, here, total_steps=1))
        try:
            merging.initialize()
        except ModelError as error:
            raise ConfigError(
                f"--merge: a service trained this run, so hone merges the adapter into the weights of {model.path}: "
                f"{' '.join(str(error).replace(name, 'the adapter').split())}; put the base model's weights there, or "
                "leave --merge out, which exports the adapter alone"
            ) from error
        merging.engine.export_hf(folder)
