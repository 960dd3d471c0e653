"""Load a run file of any kind: `kind: rl` (the default), `distill`, `sft`, `prefer` or `reward_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.composition import Layer, read_layers
from hone.config import Config, ConfigError, Loaded, load_layers
from hone.registry import resolve, unknown


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of run, and the command that runs it."""

    settings: str  # "module:class"
    command: str
    run: str  # "module:function", which gets the settings and a RunControl
    summary: str  # of the command, in `hone --help`
    columns: tuple[str, ...]  # that the rows of its data should have
    needs: tuple[str, ...] = ()  # flags of a run without a run file, beyond --model and --data
    per_step: str = "samples_per_step"  # the key of what one step trains on
    peak_rate: float | None = None  # of a run without a run file; None: the default, which is for RL and preferences

    def load(self) -> type[Config]:
        """The settings class."""
        cls: type[Config] = resolve(self.settings)
        return cls


DEFAULT_KIND = "rl"
RUN_FILES = (".yaml", ".yml")
MAPPING = "the mapping"  # a run file that is a Python object, in errors
_LAUNCH, _SUPERVISED = "hone.trainers.run.launch", "hone.trainers.supervised.settings"
KINDS = {
    "rl": Kind(
        "hone.trainers.policy.settings:PolicyRunConfig",
        "hone train",
        f"{_LAUNCH}:run_policy",
        "Train a policy with reinforcement learning.",
        ("prompt", "ground_truth"),
        needs=("--reward",),
        per_step="update.prompts_per_step",
    ),
    "distill": Kind(
        "hone.trainers.policy.settings:DistillRunConfig",
        "hone distill",
        f"{_LAUNCH}:run_policy",
        "Distil teacher models into a policy, on the policy's own samples.",
        ("prompt",),
        needs=("--teacher",),
        per_step="update.prompts_per_step",
    ),
    "sft": Kind(
        f"{_SUPERVISED}:SupervisedRunConfig",
        "hone sft",
        f"{_LAUNCH}:run_supervised",
        "Fine-tune a model on examples.",
        ("prompt", "completion"),
        peak_rate=1e-5,
    ),
    "prefer": Kind(
        f"{_SUPERVISED}:PreferenceRunConfig",
        "hone prefer",
        f"{_LAUNCH}:run_preference",
        "Train a model on preferences: DPO and its variants, KTO.",
        ("prompt", "chosen", "rejected"),
    ),
    "reward_model": Kind(
        f"{_SUPERVISED}:RewardModelRunConfig",
        "hone reward-model",
        f"{_LAUNCH}:run_reward_model",
        "Train a reward model: it scores answers, or their steps.",
        ("prompt", "chosen", "rejected"),
        peak_rate=1e-5,
    ),
}


def load_recipe(path: Path, overrides: Sequence[str] = (), kind: str | None = None) -> Loaded[Any]:
    """Read a run file with `key=value` overrides. `kind` is the kind that the caller runs; None accepts any.

    Raises ConfigError; for a file of another kind, the message names the command that runs it.
    """
    return load_run(read_layers(path, overrides), str(path), kind)


def run_file_of(place: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The run file and overrides for a run file, or for the folder of a run. Raises ConfigError for another folder."""
    if not place.is_dir():
        return place, list(overrides)
    if not (place / "config.yaml").is_file():
        raise ConfigError(f"{place} is not the folder of a run: it has no config.yaml; give a run folder or a run file")
    return place / "config.yaml", [f"run.dir='{place}'", *overrides]  # the folder may have been moved


def load_run(layers: Sequence[Layer], place: str, kind: str | None = None) -> Loaded[Any]:
    """Build the settings of a run of any kind; `place` names them in an error. Otherwise as `load_recipe`."""
    named = stated_kind(layers)
    layers = _one_length(layers)
    found = named or kind or DEFAULT_KIND
    if kind is not None and found != kind:
        command = KINDS[found].command
        by_name = command.replace(" ", ".").replace("-", "_")
        remedy = f"{by_name}(...)" if place == MAPPING else f"`{command} {place}`"
        raise ConfigError(f"{place} has kind: {found}, expected {kind}; run it with {remedy}")
    loaded = load_layers(KINDS[found].load(), layers)
    _ = loaded.config.kind  # counts as read: it chose the settings class
    return loaded


def _one_length(layers: Sequence[Layer]) -> list[Layer]:
    """The layers, in which the last that sets one of `run.steps` and `run.epochs` clears the other in those below."""
    found = [one.data.get("run") if isinstance(one.data, dict) else None for one in layers]
    runs = [run if isinstance(run, dict) else {} for run in found]
    lengths = [  # null in a layer above takes a length back
        [key for key in ("steps", "epochs") if None not in [run.get(key), *(one.get(key, "") for one in runs[at:])]]
        for at, run in enumerate(runs)
    ]
    top = max((number for number, keys in enumerate(lengths) if keys), default=0)
    if len(lengths[top]) != 1:
        return list(layers)
    (other,) = {"steps", "epochs"} - {*lengths[top]}
    if not any(other in keys for keys in lengths[:top]):
        return list(layers)
    source, data = layers[top]
    return [*layers[:top], Layer(source, {**data, "run": {other: None, **runs[top]}}), *layers[top + 1 :]]


def stated_kind(layers: Sequence[Layer]) -> str | None:
    """The kind set by the last layer that sets one. Raises ConfigError for an unknown kind."""
    named = [layer for layer in layers if "kind" in layer.data]
    if not named:
        return None
    source, kind = named[-1].source, named[-1].data["kind"]
    if kind not in KINDS:
        raise ConfigError(f"{source}: {unknown('kind', str(kind), list(KINDS))}")
    return str(kind)
