"""`rollout.engine`: options of a server's engine by its own names, written as its command line has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hone.config import ConfigError


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


__all__ = ["check_reserved", "command_arguments"]
