"""Loading a run file whose kind it says itself: `kind: rl` (the default), `sft`, `prefer` or `reward_model`."""

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
    """A kind of run: its settings class, and the command that runs it."""

    settings: str  # "module:class"
    command: str

    def load(self) -> type[Config]:
        """The settings class."""
        cls: type[Config] = resolve(self.settings)
        return cls


DEFAULT_KIND = "rl"
KINDS = {
    "rl": Kind("hone.trainers.settings:PolicyRunConfig", "hone train"),
    "distill": Kind("hone.trainers.settings:DistillRunConfig", "hone distill"),
    "sft": Kind("hone.trainers.supervised_settings:SupervisedRunConfig", "hone sft"),
    "prefer": Kind("hone.trainers.supervised_settings:PreferenceRunConfig", "hone prefer"),
    "reward_model": Kind("hone.trainers.supervised_settings:RewardModelRunConfig", "hone reward-model"),
}


def load_recipe(path: Path, overrides: Sequence[str] = (), kind: str | None = None) -> Loaded[Any]:
    """Read a run file with `key=value` overrides. `kind` is what the caller runs; None: whatever the file says.

    Raises ConfigError, also for a file of another kind, naming the command that runs it.
    """
    layers = read_layers(path, overrides)
    named = stated_kind(layers)
    found = named or kind or DEFAULT_KIND
    if kind is not None and found != kind:
        raise ConfigError(f"{path} has kind: {found}; run it with `{KINDS[found].command}`")
    loaded = load_layers(KINDS[found].load(), layers)
    _ = loaded.config.kind  # this is where it is used
    return loaded


def stated_kind(layers: Sequence[Layer]) -> str | None:
    """The kind that the last layer to name one names. Raises ConfigError if there is none of that name."""
    named = [layer for layer in layers if "kind" in layer.data]
    if not named:
        return None
    source, kind = named[-1].source, named[-1].data["kind"]
    if kind not in KINDS:
        raise ConfigError(f"{source}: {unknown('kind', str(kind), list(KINDS))}")
    return str(kind)
