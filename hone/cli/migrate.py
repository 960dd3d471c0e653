"""`hone migrate`: a run file from a script, a command or a settings file of another framework. Nothing of it is run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.errors import EXIT_DECISIONS, say
from hone.cli.recipe import KINDS, RUN_FILES, load_recipe
from hone.composition import ConfigError
from hone.migration.migration import Migration, plain
from hone.migration.openrlhf.reader import migrate_openrlhf
from hone.migration.page import run_file
from hone.migration.trl.command import COMMANDS, kind_of, options_of_shell, options_of_yaml
from hone.migration.trl.reader import migrate_trl
from hone.migration.trl.source import options_of_script
from hone.migration.verl.command import launch_of_script, launch_of_yaml
from hone.migration.verl.reader import migrate_verl
from hone.registry import unknown

FRAMEWORKS = ("verl", "trl", "openrlhf")
MAX_BYTES = 2_000_000
"""Largest script that is read."""
LONGEST_NAME = 255
"""Characters of a file's name with spaces; what is longer is a command."""


@dataclass(frozen=True, slots=True)
class Source:
    """Text to migrate, its file (none: a command was given), and the run file to write (none: it is printed)."""

    text: str
    file: Path | None
    target: Path | None

    @property
    def name(self) -> str:
        return "the command" if self.file is None else str(self.file)

    @property
    def folder(self) -> Path:
        return Path() if self.file is None else self.file.parent

    @property
    def suffix(self) -> str:
        return "" if self.file is None else self.file.suffix


def migrate(
    framework: Annotated[str, typer.Argument(help=f"whose script it is: {', '.join(FRAMEWORKS)}")],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE [RUN.yaml]",
            help="bash script, Python script (TRL), YAML of the settings, or a command in quotes; then the run file to "
            "write (default: print it). A command without quotes: [RUN.yaml] -- COMMAND",
        ),
    ],
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="environment variable of the script; may be repeated"),
    ] = None,
    kind: Annotated[str, typer.Option(help=f"trl, YAML only: what is trained ({', '.join(COMMANDS)})")] = "",
    devices: Annotated[int, typer.Option(help="trl only: processes that train, which multiply the batch", min=1)] = 1,
) -> int:
    """Write a run file from a script or a command of another framework. Exit code 3: something is left to decide."""
    if framework not in FRAMEWORKS:
        raise ConfigError(unknown("framework", framework, list(FRAMEWORKS)))
    source = _source(words)
    target = source.target
    if target is not None and target.exists():
        raise ConfigError(f"{target} exists; choose another name, or delete it")
    try:
        migration = _migrated(framework, source, _variables(variables or []), kind, devices)
    except ConfigError as error:
        raise ConfigError(f"{source.name}: {error}") from error
    origin = "a command" if source.file is None else source.file.name
    page = run_file(
        migration, f"From {origin} of {framework}, by hone migrate. Each comment names the option of a value."
    )
    if target is None:
        typer.echo(page, nl=False)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    return _summary(migration, target)


def _source(words: Sequence[str]) -> Source:
    """Read what the arguments name. More than two are a command, perhaps behind the run file to write."""
    if len(words) > 2:
        named = words[0].endswith(RUN_FILES)
        return Source(shlex.join(words[1:] if named else words), None, Path(words[0]) if named else None)
    first, target = words[0], Path(words[1]) if words[1:] else None
    if len(first.split()) > 1 and (len(first) > LONGEST_NAME or not Path(first).is_file()):
        return Source(first, None, target)
    return Source(_text(Path(first)), Path(first), target)


def _text(source: Path) -> str:
    if not source.is_file():
        raise ConfigError(f"there is no file {source}")
    if source.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{source} has more than {MAX_BYTES:,} bytes, so it is no script that trains")
    try:
        return source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not text in UTF-8: {error.reason} at byte {error.start}") from error


def _migrated(framework: str, source: Source, variables: dict[str, str], kind: str, devices: int) -> Migration:
    text, settings = source.text, source.suffix in RUN_FILES
    if framework == "verl":
        return migrate_verl(launch_of_yaml(text) if settings else launch_of_script(text, variables, []))
    if framework == "openrlhf":
        return migrate_openrlhf(text, variables)
    if kind and kind not in COMMANDS:
        raise ConfigError(f"--kind: {unknown('kind', kind, list(COMMANDS))}")
    if source.suffix == ".py":
        script = options_of_script(text, variables)
        return migrate_trl(script.kind, script.options, script.notes, devices)
    if settings:
        options = options_of_yaml(text)
        return migrate_trl(kind or kind_of(options), options, [], devices)
    found, options, notes, choices = options_of_shell(text, variables, source.folder)
    return migrate_trl(kind or found, options, notes, devices, choices)


def _variables(given: list[str]) -> dict[str, str]:
    found = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigError(f"--set {one!r} should be NAME=VALUE, such as HOME=/data")
        found[name] = value
    return found


def _summary(migration: Migration, target: Path | None) -> int:
    """Say what became of the options, check the run file, and return the exit code."""
    left, unknown_options = migration.undecided(), migration.unknown
    counts = {
        "have a key here": len(migration.mapped),
        "need none": len(migration.dropped),
        "are left to you": len(migration.decided_by_hand),
        "are unknown": len(unknown_options),
    }
    say(f"{len(migration.options)} options: {', '.join(f'{count} {what}' for what, count in counts.items())}")
    for sentence in left:
        say(f"to decide: {sentence}")
    for name, value in unknown_options.items():
        say(f"unknown: {name}={plain(value)}")
    if target is not None:
        try:
            load_recipe(target, [])
        except ConfigError as error:
            say(f"to mend before it runs: {error}")
            return EXIT_DECISIONS
        command = KINDS[str(migration.settings["kind"].value)].command
        say(f"to see all settings: hone config {target}")
        say(f"to try data, rewards and model without training: hone check {target}")
        say(f"to see whether it fits, and how long it takes: hone plan {target}")
        say(f"to run it: {command} {target}")
    else:
        say("to check it: write it to a file (hone migrate ... RUN.yaml), then hone config, hone check, hone plan")
    return EXIT_DECISIONS if left or unknown_options else 0
