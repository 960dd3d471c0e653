"""The run file of a migration: settings as YAML, each with its source, and what a person should know below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.composition import to_yaml
from hone.migration.migration import Line, Migration, plain

WIDTH = 118

SECTIONS = [
    "kind",
    "run",
    "model",
    "data",
    "reward",
    "samples_per_step",
    "update",
    "algorithm",
    "loss",
    "rollout",
    "weights",
    "asynchrony",
    "actor",
    "critic",
    "reference",
    "distillation",
    "evaluation",
    "checkpoint",
    "profile",
    "tracking",
    "runtime",
]
"""Sections of a run file in the order of writing."""


def run_file(migration: Migration, head: str) -> str:
    """Return the text of the run file: a head, settings with their sources, then the four lists as comments."""
    tree = _tree(migration.settings)
    ordered = {section: tree[section] for section in sorted(tree, key=_place)}
    parts = [_comment(head), *_section(ordered, "")]
    unknown = [f"{name}={plain(value)}" for name, value in migration.unknown.items()]
    dropped = [f"{name}: {reason}" for name, reason in migration.dropped.items()]
    for title, lines in (
        ("To decide by hand", migration.undecided()),
        ("Unknown options, which are in no list of this command", unknown),
        ("Differences that need no decision", migration.notes),
        ("Dropped, because hone needs no such option", dropped),
    ):
        if lines:
            parts += ["", f"# {title}:", *[_comment(f"- {line}", "  ") for line in lines]]
    return "\n".join(parts) + "\n"


def _place(section: str) -> int:
    return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)


def _tree(settings: Mapping[str, Line]) -> dict[str, Any]:
    """Nested mappings of dotted keys. A key below another's value turns that value into the entry's `name`."""
    tree: dict[str, Any] = {}
    for key, line in settings.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            below = place.setdefault(part, {})
            if isinstance(below, Line):
                below = place[part] = {"name": below}
            place = below
        if isinstance(place.get(last), dict):
            place[last] = {"name": line, **place[last]}
        else:
            place[last] = line
    return tree


def _section(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in tree.items():
        name = to_yaml({key: 0}).rpartition(":")[0]
        if isinstance(value, Line):
            first, *more = to_yaml({key: value.value}).splitlines()
            source = f"  # {' '.join(value.source.split())}" if value.source else ""
            lines += [f"{indent}{first}{source}", *(f"{indent}{line}" for line in more)]
        else:
            lines += [f"{indent}{name}:", *_section(value, indent + "  ")]
    return lines


def _comment(text: str, hanging: str = "") -> str:
    """Text as comment lines of at most `WIDTH` characters."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) + 3 > WIDTH:
            lines.append(f"# {line}")
            line = f"{hanging}{word}"
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, f"# {line}"])
