"""Options of a command line in the form `--name value`, `--name=value`, `--name a b`, and `--switch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from hone.composition import from_yaml


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command's words, with `-` in names as `_`. A flag without a value is True."""
    options: dict[str, Any] = {}
    name = ""
    values: list[Any] = []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                options[name] = values[0] if len(values) == 1 else list(values) if values else True
            name, separator, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [_value(value)] if separator else []
        elif name:
            values.append(_value(word))
    return options


def _value(text: str) -> Any:
    try:
        value = from_yaml(text) if text else ""
    except (yaml.YAMLError, ValueError):
        return text
    return text if isinstance(value, dict) else value
