"""Entry point and options of a verl script, or of a YAML file that Hydra composed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from hone.composition import ConfigError, from_yaml
from hone.migration.flags import flags_of
from hone.migration.shell.holes import hole, shown
from hone.migration.shell.script import read_script

OPTION = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<name>[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)

ENTRY_POINTS: Mapping[str, str] = {
    "verl.trainer.main_ppo": "rl",
    "verl.trainer.main_ppo_sync": "rl",
    "recipe.dapo.main_dapo": "rl",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off",
    "verl.experimental.one_step_off_policy.async_main_ppo": "one_step_off",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async",
    "verl.trainer.sft_trainer": "sft",
    "verl.trainer.sft_trainer_ray": "sft",
    "verl.trainer.fsdp_sft_trainer": "sft",
}
"""Module that a script starts -> kind of run."""

LAUNCHER = ("nproc_per_node", "nnodes")
"""Options of torchrun that say how many processes train."""

MAX_DEPTH = 32
"""Levels of a YAML file, and of values that name others."""

REFERENCE = re.compile(r"\$\{(?P<select>oc\.select: *)?(?P<name>\.?[\w.]+) *(?:, *(?P<default>[^{}]*))?\}")
MAX_REPLACED = 10_000
"""Characters of a value in which names of other options are replaced."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a trainer: the kind of run, its options, and what was not read; `choices` are to be decided."""

    kind: str
    module: str
    options: Mapping[str, Any]
    notes: Sequence[str] = field(default_factory=list)
    choices: Sequence[str] = field(default_factory=list)


def launch_of_script(text: str, variables: Mapping[str, str], arguments: Sequence[str]) -> Launch:
    """Return the one start of a verl trainer in a bash script. Raises ConfigError if there is none or several."""
    found = read_script(text, variables, arguments)
    launches = [(module, words) for words in found.commands if (module := _module(words))]
    if not launches:
        known = ", ".join(ENTRY_POINTS)
        unread = "".join(f"\n{note}" for note in found.notes)
        raise ConfigError(f"the script starts no trainer of verl that is known here ({known}){unread}")
    notes = found.other_notes
    if len(launches) > 1:
        notes.append(f"the script starts {len(launches)} trainers; this is the first: {launches[0][0]}")
    module, words = launches[0]
    choices = list(found.choices)
    return Launch(ENTRY_POINTS[module], module, _options(words, choices), notes, choices)


def launch_of_yaml(text: str) -> Launch:
    """Return the options of a YAML file with verl's sections. Raises ConfigError."""
    try:
        data = from_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"this is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"this should contain a mapping (key: value), found {type(data).__name__}")
    flat = dict(_flat(data, "", MAX_DEPTH))
    options = {name: _resolved(name, flat) for name in flat}
    kind = "rl" if any(name.startswith("actor_rollout_ref.") for name in options) else "sft"
    if kind == "sft" and not any(name.startswith("model.") for name in options):
        raise ConfigError("this has neither verl's section actor_rollout_ref nor its section model")
    if any(name.startswith("async_training.") for name in options):
        kind = "fully_async"
    return Launch(kind, "a YAML file", options)


def _flat(data: Mapping[Any, Any], prefix: str, depth: int) -> list[tuple[str, Any]]:
    if depth == 0:
        raise ConfigError(f"{prefix.rstrip('.')} has more than {MAX_DEPTH} levels")
    flat: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat += _flat(value, f"{prefix}{key}.", depth - 1)
        elif key not in ("_target_", "defaults", "hydra"):
            flat.append((f"{prefix}{key}", value))
    return flat


def _resolved(name: str, options: Mapping[str, Any]) -> Any:
    """Value of an option with Hydra's `${a.b}` and `${oc.select:a.b,default}` replaced; a hole if that is not all."""
    value = options[name]
    for _ in range(MAX_DEPTH):
        found = REFERENCE.search(value) if isinstance(value, str) and len(value) < MAX_REPLACED else None
        if found is None:
            break
        target = found["name"]
        target = f"{name.rpartition('.')[0]}{target}" if target.startswith(".") else target
        if target not in options and not found["select"]:
            break
        new = options[target] if target in options else _value(found["default"] or "null")
        value = new if found[0] == value else value.replace(found[0], str(new))
    return hole(value) if isinstance(value, str) and "${" in value else value


def _module(words: Sequence[str]) -> str:
    """The trainer's module that a command starts; empty if it starts none."""
    for word in words:
        name = word.removesuffix(".py").replace("/", ".")
        for module in ENTRY_POINTS:
            if name == module or name.endswith(f".{module}"):
                return module
    return ""


def _options(words: Sequence[str], choices: list[str]) -> dict[str, Any]:
    """Options of a command line: Hydra's `key=value`, `+key=value`, `++key=value`, `~key`, and `--config-name`."""
    options: dict[str, Any] = {}
    start = next(place for place, word in enumerate(words) if _module([word]))
    for name, number in flags_of(words[:start]).items():
        if name in LAUNCHER and number != "":
            options[f"--{name}"] = number[0] if isinstance(number, list) else number  # torchrun's own options
    for word, following in zip(words[start:], [*words[start + 1 :], ""], strict=True):
        flag, separator, value = word.partition("=")
        if flag == "--config-name":
            options["--config-name"] = shown(value if separator else following).strip("'\"")
        elif flag in ("--config-path", "--config-dir"):
            continue
        elif found := OPTION.fullmatch(word):
            if found["mark"] == "~":
                options.pop(found["name"], None)
            else:
                options[found["name"]] = _value(found["value"])
        elif word.startswith("~"):
            options.pop(word[1:], None)
        elif "$" in shown(word) and word != shown(word):
            name = shown(word).strip("${}")
            way = f"give --set {name}=VALUE" if name.isidentifier() else "add its options to the file"
            choices.append(f"the argument {shown(word)} is known only when the script runs: {way}")
    return options


def _value(text: str) -> Any:
    """A value as Hydra reads it; what is no YAML stays text."""
    try:
        value = from_yaml(text) if text.strip() else ""
    except (yaml.YAMLError, ValueError):
        return text.strip("'\"")
    if isinstance(value, dict) or (value is None and text.strip().lower() not in ("null", "~")):
        return text
    return value
