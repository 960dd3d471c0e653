"""Options of TRL's command line, and of its YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from hone.composition import ConfigError, from_yaml
from hone.migration.flags import flags_of
from hone.migration.shell.script import read_script

COMMANDS = ("grpo", "rloo", "sft", "dpo", "kto", "orpo", "reward")
"""Kinds of training of the `trl` command and of TRL's example scripts."""


def options_of_yaml(text: str) -> dict[str, Any]:
    """Return the options of a YAML file of the `trl` command. Raises ConfigError."""
    try:
        data = from_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"this is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError("this should contain a mapping of options to values")
    return data


def options_of_shell(
    text: str, variables: Mapping[str, str], folder: Path
) -> tuple[str, dict[str, Any], list[str], list[str]]:
    """Return kind, options, notes and choices of a shell script that starts a training of TRL.

    `folder`: of the script, where the file of its option `--config` may be.

    Raises:
        ConfigError: the script starts no training, or the file of `--config` cannot be read.
    """
    found = read_script(text, variables, [])
    launches = [one for words in found.commands if (one := _start(words))]
    if launches:
        kind, words, at = launches[0]
        notes, processes = _launcher(flags_of(words[:at]))
        if len(launches) > 1:
            notes.append(f"the script starts {len(launches)} trainings; this is the first: {words[at]}")
        options = _with_file(flags_of(words[at + 1 :]), folder)
        return kind, processes | options, [*found.other_notes, *notes], found.choices
    known = ", trl ".join(COMMANDS)
    unread = "".join(f"\n{note}" for note in found.notes)
    raise ConfigError(f"the script starts no training of TRL (trl {known}, or TRL's scripts/NAME.py){unread}")


def _with_file(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options of a command and of its `--config` file, which lies in the current folder or in the script's."""
    name = str(options.get("config", ""))
    file = next((one for one in (Path(name), folder / name) if one.is_file()), None)
    if file is None:
        return options
    try:
        found = options_of_yaml(file.read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {name}: {error}") from error
    return found | {key: value for key, value in options.items() if key != "config"}


def _launcher(options: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Notes about the options of accelerate or torchrun, and the number of processes that they start."""
    ranks = options.get("num_processes", options.get("nproc_per_node"))
    if isinstance(ranks, list):
        ranks = ranks[0]  # the module or script stands behind it
    others = sorted(set(options) - {"num_processes", "nproc_per_node", "nnodes"})
    notes = [f"options of the launcher are not read: {', '.join(f'--{name}' for name in others)}"] if others else []
    machines = options.get("nnodes", 1) if "nproc_per_node" in options else 1
    if not isinstance(ranks, int) or not isinstance(machines, int):
        return notes, {} if ranks is None else {"num_processes": ranks}
    return notes, {"num_processes": ranks * machines}


def _start(words: list[str]) -> tuple[str, list[str], int] | None:
    """Kind of the training that a command starts, the command, and the place that says so."""
    for at, word in enumerate(words):
        kind = _kind(words[at - 1] if at else "", word)
        if kind:
            return kind, words, at
    return None


def _kind(before: str, word: str) -> str:
    stem = PurePath(word).stem
    if PurePath(before).name == "trl" and word in COMMANDS:
        return word
    if word.startswith("trl.scripts.") and word.rpartition(".")[2] in COMMANDS:
        return word.rpartition(".")[2]
    if word.endswith(".py"):
        return next((kind for kind in COMMANDS if stem == kind or stem.startswith(f"{kind}_")), "")
    return ""


def kind_of(options: Mapping[str, Any]) -> str:
    """Return the kind of training that a file's options belong to. Raises ConfigError if several would fit."""
    if "reward_funcs" in options or "num_generations" in options or "max_completion_length" in options:
        return "grpo"
    if "center_rewards_coefficient" in options:
        return "reward"
    raise ConfigError("the file does not say what it trains; give --kind grpo, sft, dpo or reward")
