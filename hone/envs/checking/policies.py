"""Policies without a model: one that does everything right, and one that does everything, right or wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hone.data.messages import Tools
from hone.envs.tool_calls import Call, Said
from hone.types import Prompt

DEEPEST = 5  # levels of an argument that is made up
WORDS = ("yes", "4", "", " ", "no idea", "\n\n", "naïve ☃", "a b c d e f g", "-1", "{}", "<think>")
Make = Callable[[Mapping[str, Any]], Any]


class Policy(Protocol):
    """Plays one episode."""

    def says(self, turn: int, tools: Tools) -> Said:
        """Return the answer of this turn; the same in every episode of the same prompt and sample."""


class Scripted:
    """Calls each tool once, with arguments that fit its schema, and then answers with the ground truth.

    A row with a column `walkthrough`, a list of answers, is answered by these first.
    """

    name = "scripted"

    def __init__(self, prompt: Prompt, sample: int) -> None:
        self._answer = "done" if prompt.ground_truth is None else str(prompt.ground_truth)
        self._walkthrough = [str(one) for one in prompt.row.get("walkthrough") or ()]

    def says(self, turn: int, tools: Tools) -> Said:
        if turn < len(self._walkthrough):
            return Said(self._walkthrough[turn])
        turn -= len(self._walkthrough)
        if turn >= len(tools):
            return Said(self._answer)
        return Said("", calls=(_call(tools[turn], lambda schema: fitting(schema, None)),))


class Random:
    """Answers with odd texts, and calls tools with good and bad arguments, unknown names and broken calls."""

    name = "random"

    def __init__(self, prompt: Prompt, sample: int) -> None:
        self._rng = random.Random(f"{prompt.prompt_id}/{sample}")

    def says(self, turn: int, tools: Tools) -> Said:
        rng = self._rng
        if not tools or rng.random() < 0.2:
            return Said(" ".join(rng.choice(WORDS) for _ in range(rng.randrange(4))), thought=rng.choice(("", "well")))
        return Said("", calls=tuple(self._call(rng.choice(list(tools))) for _ in range(rng.choice((1, 1, 2)))))

    def _call(self, tool: Mapping[str, Any]) -> Call:
        kind = self._rng.choice(("good", "good", "good", "odd", "unknown", "broken"))
        if kind == "unknown":
            return Call("no_such_tool", {}, "no_such_tool()")
        if kind == "broken":
            return Call(text='{"name": ', error="it is cut off")
        wrong = kind == "odd"
        return _call(
            tool, lambda schema: self._rng.choice((None, "x", -1, [])) if wrong else fitting(schema, self._rng)
        )


POLICIES: Sequence[type[Scripted] | type[Random]] = (Scripted, Random)


def fitting(schema: Mapping[str, Any], rng: random.Random | None) -> Any:
    """A value that fits a JSON schema: a plain one, or a random one. Formats and patterns are not considered.

    >>> fitting({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, None)
    {'a': 1}
    """
    return _value(schema, schema, rng, DEEPEST)


def _value(schema: Mapping[str, Any], root: Mapping[str, Any], rng: random.Random | None, depth: int) -> Any:
    schema = _resolved(schema, root)
    for key in ("const", "default"):
        if key in schema and (rng is None or rng.random() < 0.5):
            return schema[key]
    for key in ("enum", "anyOf", "oneOf", "allOf"):
        if options := schema.get(key):
            chosen = options[0] if rng is None else rng.choice(options)
            return chosen if key == "enum" else _value(chosen, root, rng, depth - 1) if depth else None
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        wanted = schema.get("required", ()) if depth else ()
        properties = schema.get("properties", {})
        return {name: _value(properties.get(name, {}), root, rng, depth - 1) for name in wanted}
    if kind == "array":
        count = max(int(schema.get("minItems", 1)), 1) if depth else 0
        return [_value(schema.get("items", {}), root, rng, depth - 1) for _ in range(count)]
    return _scalar(kind, schema, rng)


def _scalar(kind: str, schema: Mapping[str, Any], rng: random.Random | None) -> Any:
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        high = max(low, schema.get("maximum", low + 100))
        number = low if rng is None else rng.randint(int(low), int(high))
        return number if kind == "integer" or rng is None else float(number)
    if kind == "boolean":
        return True if rng is None else rng.random() < 0.5
    if kind == "null":
        return None
    text = "a" if rng is None else rng.choice(WORDS)
    return text.ljust(int(schema.get("minLength", 0)), "a")[: int(schema.get("maxLength", 1000))]


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference within the same document names."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def _call(tool: Mapping[str, Any], make: Make) -> Call:
    function = tool["function"]
    schema = function.get("parameters") or {}
    names = schema.get("required", ())
    arguments = {name: make({**schema.get("properties", {}).get(name, {}), **_definitions(schema)}) for name in names}
    return Call(str(function["name"]), arguments, json.dumps(arguments, default=str))


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"$defs": schema["$defs"]} if "$defs" in schema else {}


__all__ = ["POLICIES", "Policy", "Random", "Scripted", "fitting"]
