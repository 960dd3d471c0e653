"""Explain settings to people and editors: the meaning of a key, annotated YAML, a JSON schema."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from hone.config import DEFAULT, Choice, Config, ConfigError, FromRegistry, Loaded, Section, default_of, dump, sections
from hone.registry import CannotLoad, Registry


@dataclass(frozen=True, slots=True)
class Explanation:
    """Facts about one key that `hone config --explain KEY` prints."""

    key: str
    meaning: str
    unit: str
    type: str
    default: str
    value: Any
    source: str


def explain(loaded: Loaded[Any], key: str) -> list[Explanation]:
    """The explanations of a key, or of every key of a section. Raises ConfigError with the nearest keys."""
    found = [known for known in loaded.provenance if known == key or known.startswith(f"{key}.")]
    if found:
        tree = {section.prefix: section for section in sections(loaded.config)}
        return [_explain_one(tree, loaded, name) for name in found]
    empty = [known for known in loaded.provenance if key.startswith(f"{known}.")]
    if empty:
        raise ConfigError(f"{key} has no value in this run, because {empty[0]} is not set")
    near = difflib.get_close_matches(key, list(loaded.provenance), n=3, cutoff=0.4)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"unknown key {key!r}{meant} (hone config --explain finds keys by words)")


def _explain_one(tree: Mapping[str, Section], loaded: Loaded[Any], key: str) -> Explanation:
    prefix = max((prefix for prefix in tree if key.startswith(prefix)), key=len)
    section, name = tree[prefix], key.removeprefix(prefix)
    info: FieldInfo = type(section.config).model_fields[name]
    meaning, kind = info.description or "", type_text(info)
    registry = registry_of(section.field) if isinstance(section.config, Choice) and name == "name" else None
    if registry is not None and section.field is not None:
        meaning = section.field.description or meaning
        kind = _names_text(registry.registry)
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    value, source = section.config.__dict__[name], loaded.provenance[key]
    return Explanation(
        key=key,
        meaning=meaning,
        unit=str(extra.get("unit", "")),
        type=kind,
        default=value_text(value if source == DEFAULT else _default(section, name)),
        value=value,
        source=source,
    )


def _default(section: Section, name: str) -> Any:
    """The default of a field in its place: from the default object of its owner, else from its class."""
    owner = default_of(section.field) if section.field is not None else None
    if isinstance(owner, type(section.config)):
        return owner.__dict__[name]
    return default_of(type(section.config).model_fields[name])


def registry_of(field: FieldInfo | None) -> FromRegistry | None:
    marks = [] if field is None else [*field.metadata, *_marks(field.annotation)]
    return next((mark for mark in marks if isinstance(mark, FromRegistry)), None)


def _marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for inner in get_args(annotation):
        yield from _marks(inner)


def value_text(value: Any) -> str:
    """A value as it is written in a run file, on one line."""
    if value is PydanticUndefined:
        return "required"
    plain_value = to_jsonable_python(value, serialize_as_any=True)
    return plain_value if plain_value and isinstance(plain_value, str) else json.dumps(plain_value, ensure_ascii=False)


def type_text(info: FieldInfo) -> str:
    """The type of a field in words, with its bounds: `int >= 1 or null`."""
    bounds = "".join(
        f" {sign} {getattr(mark, name)}" for mark in info.metadata for name, sign in _BOUNDS if hasattr(mark, name)
    )
    text = _annotation_text(info.annotation)
    return text.replace(" or null", f"{bounds} or null") if " or null" in text else text + bounds


_BOUNDS = (
    ("gt", ">"),
    ("ge", ">="),
    ("lt", "<"),
    ("le", "<="),
    ("min_length", "of length >="),
    ("max_length", "of length <="),
)
_WORDS = {
    str: "text",
    bool: "true or false",
    int: "int",
    float: "number",
    Path: "path",
    type(None): "null",
    Any: "anything",
}


def _names_text(registry: Registry) -> str:
    return f"one of {', '.join(registry)}" + (", or file.py:name" if registry.references else "")


def _annotation_text(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Annotated:
        marks = [mark for mark in annotation.__metadata__ if isinstance(mark, FromRegistry)]
        return _names_text(marks[0].registry) if marks else _annotation_text(inner[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (list, tuple):
        return f"list of {_annotation_text(inner[0])}"
    if origin is dict:
        return f"mapping of {_annotation_text(inner[0])} to {_annotation_text(inner[1])}"
    if inner:
        return " or ".join(_annotation_text(arm) for arm in sorted(inner, key=lambda arm: arm is type(None)))
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "a section"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(str(member.value) for member in annotation)}"
    return getattr(annotation, "__name__", str(annotation))


# ------------------------------------------------------------------------------------------------ annotated YAML


def annotated(loaded: Loaded[Any]) -> Iterator[tuple[str, str]]:
    """The resolved settings line by line, each with its source (empty: a default, or a line without a value)."""
    text = dump(loaded.config)
    sources: dict[int, str] = {}
    for key, line in _lines(yaml.compose(text, Loader=yaml.SafeLoader), ""):
        source = loaded.provenance.get(key, DEFAULT)
        sources[line] = "" if source == DEFAULT else source
    for number, line_text in enumerate(text.splitlines()):
        yield line_text, sources.get(number, "")


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Every dotted key of a YAML tree with the line on which its value ends."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            leaf = isinstance(value, yaml.ScalarNode) or not value.value
            yield dotted, value.end_mark.line if leaf else key.start_mark.line
            yield from _lines(value, f"{dotted}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, f"{prefix}{index}.")


# --------------------------------------------------------------------------------------------------- JSON schema


def schema(cls: type[Config]) -> dict[str, Any]:
    """The JSON schema (2020-12) of a run file, for editors, with all entries of the registries.

    It requires no key, because every key may be in the file that `defaults` names.
    """
    definitions: dict[str, Any] = {}
    root = _of_section(cls, definitions)
    named = {
        "type": "string",
        "description": "a run file whose settings are the defaults of this one; the path is relative to this file",
    }
    root["properties"] = {"defaults": named, **root["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _of_section(cls: type[Config], definitions: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, info in cls.model_fields.items():
        described = _of_value(info.annotation, info.metadata, definitions)
        default = default_of(info)
        if default is not PydanticUndefined:
            described["default"] = to_jsonable_python(default, serialize_as_any=True)
        properties[name] = described | {"description": info.description or ""}
    text = (cls.__doc__ or "").partition("\n")[0]
    return {"type": "object", "description": text, "properties": properties, "additionalProperties": False}


def _of_value(annotation: Any, metadata: list[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _of_value(inner[0], [*metadata, *annotation.__metadata__], definitions)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        mark = next((mark for mark in metadata if isinstance(mark, FromRegistry)), None)
        return _of_choice(mark.registry, definitions) if mark else _reference(annotation, definitions)
    if not _holds_config(annotation):
        constraints = [mark for mark in metadata if not isinstance(mark, FromRegistry)]
        return TypeAdapter(Annotated[annotation, *constraints] if constraints else annotation).json_schema()
    if origin in (list, tuple):
        return {"type": "array", "items": _of_value(inner[0], metadata, definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_value(inner[1], metadata, definitions)}
    return {"anyOf": [_of_value(arm, metadata, definitions) for arm in inner]}


def _of_choice(registry: Registry, definitions: dict[str, Any]) -> dict[str, Any]:
    name = f"choice of {registry.kind}"
    if name in definitions and "anyOf" not in definitions[name]:  # it contains itself: a reference ends the recursion
        definitions[name]["$comment"] = "referred to"
        return {"$ref": f"#/$defs/{name}"}
    mark = definitions[name] = definitions.get(name, {}) and {"$comment": "referred to"}
    arms: list[dict[str, Any]] = [{"enum": list(registry)}]
    for entry in registry:
        try:
            settings = registry.settings(entry) or Choice
        except CannotLoad:
            settings = Choice  # an optional part that is not installed; a run that chooses it fails with the reason
        described = _of_section(settings, definitions)
        arms.append({**described, "properties": described["properties"] | {"name": {"const": entry}}})
    if registry.references:  # settings of a class that the schema does not know
        named = {"type": "string", "pattern": ":"}
        arms += [named, {"type": "object", "properties": {"name": named}, "required": ["name"]}]
    found = {"anyOf": arms}
    if mark:
        definitions[name] = found
    else:
        del definitions[name]
    return found


def _reference(cls: type[Config], definitions: dict[str, Any]) -> dict[str, Any]:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name not in definitions:
        definitions[name] = {}  # ends the recursion of a class that contains itself
        definitions[name] = _of_section(cls, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _holds_config(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return True
    return any(_holds_config(inner) for inner in get_args(annotation))
