"""`rollout.engine`: options of a server's engine by its own names, hone's for it, and how a command line has them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.platforms.base import current_platform
from hone.rollout.base import ServerSpec


@dataclass(frozen=True)
class EngineDefaults:
    """How hone starts one engine: what a user may change, what he may not, and its environment variables."""

    reserved: Mapping[str, str] = field(default_factory=dict)  # options that hone sets, and why, or by which setting
    options: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] = field(default_factory=dict)  # further options there
    accelerator: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu_environment: Mapping[str, str] = field(default_factory=dict)

    def engine_options(self, spec: ServerSpec, needed: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options: ours for this platform and what this run needs, overridden by `rollout.engine`."""
        given = {name.replace("-", "_"): value for name, value in spec.settings.engine.items()}
        check_reserved(spec.settings.engine, self.reserved)
        platform = self.cpu if current_platform().device == "cpu" else self.accelerator
        files = {"load_format": "auto"} if spec.frozen else {}  # those of the model's folder; both engines call it so
        found = {**self.options, **platform, **files, "dtype": spec.dtype, **needed, **given}
        if "skip_tokenizer_init" not in found and not has_tokenizer(spec):
            found["skip_tokenizer_init"] = True
        return found

    def server_environment(self, spec: ServerSpec, folder: Path) -> dict[str, str]:
        """Variables of the server, which finds hone in `folder`; what the user has set of the engine's stays."""
        ours = {**self.environment, **(self.cpu_environment if current_platform().device == "cpu" else {})}
        given = {name: os.environ[name] for name in ours if name in os.environ and name != "OMP_NUM_THREADS"}
        path = [str(folder / "path"), spec.environment.get("PYTHONPATH", "")]
        return {
            **ours,
            **given,
            **spec.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "HONE_TOKEN": spec.token,
        }


def has_tokenizer(spec: ServerSpec) -> bool:
    """Whether the model's folder, or the hub for all that is known, has a tokenizer."""
    folder = Path(spec.tokenizer or spec.model).expanduser()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def command_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments: `{"enforce_eager": True, "max_model_len": 128}` -> `--enforce-eager --max-model-len=128`.

    False is `--no-...`, a mapping is JSON, a list follows its option one by one, None leaves the engine's own default.
    Whether an option exists, and what it may be, is for the engine's parser to say.
    """
    found: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, Mapping):
            found.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, list | tuple):
            found += [flag, *map(str, value)]
        else:
            found.append(f"{flag}={value}")
    return found


def check_reserved(options: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Raise ConfigError for an option that hone sets itself; `reserved` says by which setting, or why."""
    for name in options:
        plain = name.replace("-", "_")
        if plain in reserved:
            raise ConfigError(f"rollout.engine.{name} is not to be set here: {reserved[plain]}")


__all__ = ["EngineDefaults", "command_arguments"]
