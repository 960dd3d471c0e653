"""Errors of run files: a sentence that names the key and says what was expected and what was found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from hone.composition import PRESET


def _required_of(cls: type[BaseModel], name: str) -> list[str]:
    """The keys that a field without a default asks for: those inside of a section, or itself."""
    annotation = cls.model_fields[name].annotation
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return [name]
    inner = [one for one, info in annotation.model_fields.items() if info.is_required()]
    return [f"{name}.{key}" for one in inner for key in _required_of(annotation, one)] or [name]


def explain_error(error: ValidationError, cls: type[BaseModel], path: str, built: Mapping[str, Any]) -> tuple[str, str]:
    """The wrong key, and a sentence that says what was expected and what was found."""
    problems = error.errors(include_url=False)
    first = problems[0]
    inside = _inside(first["loc"], built)
    key = ".".join(filter(None, [path, *map(str, inside)]))
    if first["type"] == "missing":
        if len(inside) < len(first["loc"]):  # a tuple's entry
            return key, f"{key} has too few entries (found {first['input']!r})"
        missing = [str(one["loc"][0]) for one in problems if one["type"] == "missing"]
        asked, *more = [".".join(filter(None, [path, key])) for name in missing for key in _required_of(cls, name)]
        return path, f"{asked} is required and was not set{'; so are: ' if more else ''}{', '.join(more)}"
    same = [p for p in problems if _inside(p["loc"], built) == inside]  # one per arm of a union
    wanted = " or ".join(dict.fromkeys(p["msg"].removeprefix("Input ").removeprefix("Value error, ") for p in same))
    sentence = f"{key or 'the run file'}{' ' if wanted.startswith('should') else ': '}{wanted}"
    if (found := first["input"]) is None or isinstance(found, Mapping | BaseModel):
        return key, sentence
    size, expected = re.findall(r"\d+", str(found)), str(first.get("ctx", {}).get("expected", ""))
    choices = [one for one in re.findall(r"'([^']*)'", expected) if size in ([], re.findall(r"\d+", one))]
    near = difflib.get_close_matches(str(found), choices, n=1, cutoff=0.5)
    return key, f"{sentence} (found {found!r}{f'; did you mean {near[0]!r}?' if near else ''})"


def _inside(location: tuple[int | str, ...], built: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The part of a pydantic location that is a path into the data; the rest are names of union members."""
    value: Any = built
    for depth, part in enumerate(location):
        keys = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list | tuple) else ()
        if part not in keys:
            return location[: max(depth, 1)]
        value = value[part]
    return location


def with_preset(sentence: str, sources: Mapping[str, str]) -> str:
    """An error's sentence; if it names a key that a preset set, with that preset. `sources`: key -> layer.

    >>> with_preset("loss.name: no ratios", {"loss.name": "preset rloo"})
    'loss.name: no ratios (preset rloo sets loss.name)'
    """
    for named in dict.fromkeys(re.findall(r"\b[a-z]\w*(?:\.\w+)+", sentence)):
        by = {layer for key, layer in sources.items() if key == named or key.startswith(f"{named}.")}
        presets = sorted(layer for layer in by if layer.split(" ")[0] == PRESET and layer not in sentence)
        if presets:
            return f"{sentence} ({presets[0]} sets {named})"
    return sentence
