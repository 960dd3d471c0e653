"""Messages in one form, whoever wrote them: data files, clients of the agent endpoint, environments.

    {"role": "developer", "content": [{"type": "text", "text": "a"}]}   -> {"role": "system", "content": "a"}
    tool_calls with arguments as JSON text, or without `function`       -> {"function": {"name", "arguments": {...}}}
    weight: 0, loss_mask: 0, trainable: false ...                       -> trainable: false
    reasoning, thinking                                                 -> reasoning_content
    {"from": "human", "value": "a"}                                     -> {"role": "user", "content": "a"}
    blocks of Anthropic's (`data/blocks.py`)                            -> messages of role tool, tool_calls, thoughts

Files of Parquet have a value for every key of every row: arguments of other tools' calls are null there. The schemas of
the row's tools say which nulls are none of the call's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from hone.config import ConfigError
from hone.data.blocks import BlockError, results_apart, without_blocks
from hone.data.images import is_image
from hone.types import Message

DEEPEST = 64  # levels of JSON text
_TEXTS = ("text", "input_text", "output_text")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# 0 or false: an answer that is not learnt
_EXCLUDING = ("trainable", "train", "weight", "loss_mask", "loss", "loss_weight", "loss_scale")
_ARGUMENTS = ("arguments", "parameters", "input", "args")  # of a call, as different libraries name them
_SHAREGPT = {  # roles of the form `from`, `value`
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool_calls": "assistant",
}
_CONTENTS = ("value", "parts", "text")  # other names of a message's content
_CALLING = ("function_call", "tool_call", "tool_calls")  # senders whose value is the JSON of a call, or of a list
_ROLES = {"developer": "system", "function": "tool", "model": "assistant"}  # names that chat templates do not have
_ROLES |= {"human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "chatgpt": "assistant"}
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}  # also in capital letters


Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the functions that a model may call, as chat templates take them."""


class RenderingError(ConfigError):
    """Messages that a chat template cannot render, or whose answers cannot be found in the rendered text."""


class MessageError(RenderingError):
    """A message that cannot be understood. The text says what was found and what was expected."""


def normal_message(
    given: Any, schemas: Mapping[str, Any] | None = None, *, filled: bool = False, lenient: bool = False
) -> Message:
    """One message in hone's form; further keys stay as they are, for the chat template.

    `schemas`: the parameters of the row's tools by name, None without tools. `filled`: a missing argument may have
    become null. `lenient`: arguments that are no JSON object stay the text that a model wrote. Raises MessageError.

    >>> normal_message({"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]})
    {'role': 'user', 'content': 'Hi!'}
    """
    try:
        given = without_blocks(_with_role(given))
    except BlockError as error:
        raise MessageError(str(error)) from error
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str) or not given["role"].strip():
        raise MessageError(f"a message should have a role and a content, found {given!r:.80}")
    message: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    message["role"] = _ROLES.get(message["role"].strip().lower(), message["role"])
    learnt = _is_learnt(message)
    calls = _calls_of(message)
    thought = _one_of({name: message.get(name) for name in _THOUGHTS}, "a message") or ""
    if not isinstance(thought, str):
        raise MessageError(f"the thoughts of a message (reasoning_content) should be text, found {thought!r:.80}")
    for name in (*_THOUGHTS, *_EXCLUDING, "tool_calls", "function_call"):
        message.pop(name, None)
    if "content" in message:
        message["content"] = _content(message["content"])
    elif calls or thought:
        message["content"] = ""
    else:
        raise MessageError(f"a message of role {message['role']!r} has no content")
    if calls:
        message["tool_calls"] = [_call(call, schemas, filled, lenient) for call in calls]
    if thought:
        message["reasoning_content"] = thought
    if not learnt:
        message["trainable"] = False
    return cast(Message, message)


def _with_role(given: Any) -> Any:
    """A message of ShareGPT's form with a role and a content; every other one as it is. Raises MessageError.

    >>> _with_role({"from": "human", "value": "Hi"})
    {'role': 'user', 'content': 'Hi'}
    """
    if not isinstance(given, Mapping) or "from" not in given or "role" in given:
        return _with_content(given)
    sender = str(given["from"]).strip().lower()
    if sender not in _SHAREGPT:
        raise MessageError(f"a message is from {given['from']!r:.80}; known are {', '.join(_SHAREGPT)}")
    message = _with_content({"role": _SHAREGPT[sender], **{key: given[key] for key in given if key != "from"}})
    if sender not in _CALLING:
        return message
    try:
        calls = parsed(message.get("content"), "it")
    except MessageError as error:
        raise MessageError(
            f"a message is from {sender}, so its value should be the JSON of a call of a tool, such as "
            f'{{"name": "add", "arguments": {{}}}}; {error}; is it from gpt?'
        ) from error
    return {**message, "content": None, "tool_calls": calls}


def _with_content(given: Any) -> Any:
    """A message whose text is in `value` (ShareGPT), `parts` (Gemini) or `text`, with a content."""
    there = [name for name in _CONTENTS if isinstance(given, Mapping) and name in given]
    if not there:
        return given
    content = _one_of({name: given.get(name) for name in (*_CONTENTS, "content")}, "a message")
    rest = {key: value for key, value in given.items() if key not in (*_CONTENTS, "content")}
    return {**rest, "content": given[there[0]] if content is None else content}


def normal_messages(
    given: Sequence[Any], schemas: Mapping[str, Any] | None = None, *, filled: bool = False, lenient: bool = False
) -> tuple[Message, ...]:
    """Messages in hone's form (`normal_message`); each result of a tool in the content of one is a message of its own.

    >>> normal_messages([{"role": "user", "content": [{"type": "tool_result", "content": "4"}]}])
    ({'role': 'tool', 'content': '4'},)
    """
    try:
        apart = [message for one in given for message in results_apart(one)]
    except BlockError as error:
        raise MessageError(str(error)) from error
    return tuple(normal_message(one, schemas, filled=filled, lenient=lenient) for one in apart)


def _one_of(given: Mapping[str, Any], what: str) -> Any:
    """The value of what has several names, in a mapping of these; None if no name has a value that says anything.

    Raises MessageError if two names have different values.
    """
    found = {name: value for name, value in given.items() if value}
    first = next(iter(found.values()), None)
    if any(value != first for value in found.values()):
        raise MessageError(f"{what} has {' and '.join(found)}, which differ; leave one of them")
    return first


def stored_messages(text: str) -> list[Any] | None:
    """The messages that a text is the JSON of; None if it is a text like any other.

    >>> stored_messages('[{"role": "user", "content": "2?"}]'), stored_messages("[1, 2]")
    ([{'role': 'user', 'content': '2?'}], None)
    """
    if not text.lstrip().startswith(("[", '"[', '"\\n[')):
        return None
    try:
        found = _json(text)
    except ValueError:
        return None
    if isinstance(found, str):  # encoded twice
        return stored_messages(found)
    messages = (
        isinstance(found, list) and found and all(isinstance(one, dict) and _SENDER & one.keys() for one in found)
    )
    return found if messages else None


_SENDER = frozenset(("role", "from"))


def without_nulls(value: Any) -> Any:
    """The value without the keys that Parquet fills with null, at every depth.

    >>> without_nulls({"name": "add", "parameters": {"x": {"type": "int", "enum": None}}})
    {'name': 'add', 'parameters': {'x': {'type': 'int'}}}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nulls(inner) for inner in value]
    return value


def parameters_by_tool(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The JSON schema of each tool's parameters, for `normal_message`; None without tools."""
    functions = [tool.get("function", tool) for tool in tools]
    return {str(one.get("name")): one.get("parameters") or {"properties": {}} for one in functions} or None


_PARAMETERS = ("parameters", "input_schema", "inputSchema")  # names of the schema of a tool's parameters


def normal_tool(tool: Any) -> dict[str, Any]:
    """The JSON schema of one tool in the form that chat templates read, `{"type": "function", "function": ...}`.

    It may be JSON text itself, have its parameters as JSON text, or be the schema of the function alone, as OpenAI's
    Responses, Anthropic and MCP have it. Raises MessageError for anything else, such as tools of a provider.

    >>> normal_tool({"name": "add", "input_schema": {}})
    {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}
    """
    found = parsed(tool, "a tool") if isinstance(tool, str) and tool.lstrip().startswith("{") else tool
    function = found.get("function", found) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(function, Mapping):
        raise MessageError(f"a tool should be a JSON schema, found {tool!r:.80}")
    if _is_deep(found):
        raise MessageError(f"the tool {function.get('name')!r:.60} is nested deeper than {DEEPEST} levels")
    if "name" not in function:  # of a kind that only its template knows
        return dict(found)
    if function is found:
        kind = found.get("type", "function")
        if kind != "function" and not (kind == "custom" and "input_schema" in found):
            raise MessageError(f"the tool {found['name']!r:.60} has type {kind!r:.60}; expected function")
        found, function = {}, {key: value for key, value in found.items() if key != "type"}
    if len(given := [key for key in _PARAMETERS if key in function]) > 1:
        raise MessageError(f"the tool {function['name']!r:.60} has {' and '.join(given)}; leave one of them")
    function = {"parameters" if key in given else key: value for key, value in function.items()}
    if isinstance(function.get("parameters"), str):
        function["parameters"] = parsed(function["parameters"], f"parameters of the tool {function['name']!r:.60}")
    return {"type": "function", **found, "function": function}


# ------------------------------------------------------------------------------------------------------------ parts


def _content(content: Any) -> Any:
    """Content as text, or as a list of parts if there is an image among them."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence):
        raise MessageError(f"the content of a message should be text or a list of parts, found {content!r:.80}")
    parts = [_part(part) for part in content]
    if any(map(is_image, parts)):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if is_image(part):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get("type", "text") not in _TEXTS:
        raise MessageError(
            f"a part of a message's content should be {{'type': 'text', 'text': ...}} or an image, found {part!r:.80}"
        )
    return {"type": "text", "text": text}


def _is_learnt(message: Mapping[str, Any]) -> bool:
    """Return whether an answer is trained on. The flags of other messages say nothing: only answers are learnt."""
    flags = {name: message[name] for name in _EXCLUDING if name in message}
    if message["role"] != "assistant":
        return True
    for name, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise MessageError(f"{name} of a message should be 0 or 1 (or false or true), found {value!r:.80}")
    return all(flags.values())


# ------------------------------------------------------------------------------------------------------- tool calls


def _calls_of(message: Mapping[str, Any]) -> list[Any]:
    """The tool calls of a message; `function_call` is an earlier name of one."""
    calls = parsed(message.get("tool_calls", []), "tool_calls")
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise MessageError(f"tool_calls should be a list, found {calls!r:.80}")
    if calls and message.get("function_call"):
        raise MessageError("a message has tool_calls and function_call, an earlier name of one call; leave one of them")
    return [*calls, *([message["function_call"]] if message.get("function_call") else [])]


def _call(call: Any, schemas: Mapping[str, Any] | None, filled: bool, lenient: bool) -> dict[str, Any]:
    call = parsed(call, "a tool call")
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"a tool call should have a function with a name, found {call!r:.80}")
    name = function["name"]
    given = {key: function.get(key) for key in _ARGUMENTS}
    if function is not call:
        given |= {f"{key} beside its function": call.get(key) for key in _ARGUMENTS}
    arguments = _one_of(given, f"a call of {name}")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = _json(arguments)
            arguments = _json(arguments) if isinstance(arguments, str) and arguments else arguments  # encoded twice
        except ValueError as error:
            if not lenient:
                raise MessageError(f"the arguments of a call of {name} are text, but no JSON: {error}") from error
    elif isinstance(arguments, Mapping):
        if _is_deep(arguments):
            raise MessageError(f"the arguments of a call of {name} are nested deeper than {DEEPEST} levels")
        whole = (schemas or {}).get(name)
        arguments = _Gaps(f"arguments of {name}", whole, filled).without(arguments, whole, "")
    arguments = arguments or {}
    if not isinstance(arguments, Mapping) and not lenient:
        raise MessageError(f"the arguments of a call of {name} should be an object, found {arguments!r:.80}")
    if not lenient and not _is_json(arguments):
        raise MessageError(
            f"the arguments of a call of {name} have a number that JSON does not have: {arguments!r:.80}; write null, "
            "or remove it (pandas writes NaN where a row has no number)"
        )
    known = {"id": call["id"]} if call.get("id") else {}
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(found: Any, what: str) -> Any:
    """The value of JSON text, or what is no text as it is."""
    if not isinstance(found, str):
        return found
    try:
        value = _json(found) if found.strip() else []
        return _json(value) if isinstance(value, str) and value else value  # encoded twice
    except ValueError as error:
        raise MessageError(f"{what} is text, but no JSON: {error}") from error


def _json(text: str) -> Any:
    """The value of JSON text. Raises ValueError for other text, and for more than `DEEPEST` levels."""
    try:
        found = json.loads(text, object_pairs_hook=object_of)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _is_deep(found):
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return found


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON with these keys and values. Raises ValueError for a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.80} is there twice")
    return found


def _is_deep(value: Any) -> bool:
    """Return whether a value of JSON has more than `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level for inner in _members(one)]
        if not level:
            return False
    return True


def _is_json(value: Any) -> bool:
    """Return whether all numbers of a value are finite."""
    if isinstance(value, float):
        return math.isfinite(value)
    return all(map(_is_json, _members(value)))


def _members(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


class _Gaps:
    """Removes the nulls with which Parquet fills arguments that a call does not have."""

    def __init__(self, what: str, root: Any, filled: bool) -> None:
        self._what = what
        self._root = root
        self._filled = filled

    def without(self, value: Any, schema: Any, path: str) -> Any:
        """The value without gaps. Raises MessageError for a null of which the schema does not say what it is."""
        schema = self._resolved(schema)
        if isinstance(value, Mapping):
            known = self._properties(schema, set())
            kept = {key: one for key, one in value.items() if one is not None or self._real(key, schema, known, path)}
            return {key: self.without(one, (known or {}).get(key), f"{path}.{key}") for key, one in kept.items()}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            items = schema.get("items") if isinstance(schema, Mapping) else None
            return [self.without(one, items, f"{path}[]") for one in value]
        return value

    def _real(self, key: str, schema: Any, known: Mapping[str, Any] | None, path: str) -> bool:
        """Return whether a null is an argument of the call."""
        if known is not None and key not in known:
            return False
        if not self._filled:
            return True
        if known is None:
            raise MessageError(
                f"{self._what}: {path}.{key} is null, which Parquet also writes for an argument that is not there, and "
                "no tool of the row says which it is; add the column tools, or store the arguments as JSON text"
            )
        required = schema.get("required")
        return (isinstance(required, list) and key in required) or self._nullable(known[key], set())

    def _resolved(self, schema: Any) -> Any:
        """The schema that a `$ref` into the same document names."""
        for _ in range(8):  # a chain of references may be a circle
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return schema
            schema = self._root
            for step in reference[2:].split("/"):
                schema = schema.get(step) if isinstance(schema, Mapping) else None
        return schema

    def _properties(self, schema: Any, seen: set[int]) -> dict[str, Any] | None:
        """The properties of an object's schema and of its alternatives; None if the schema names none.

        `seen`: schemas that need no second look, because references may be a circle.
        """
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return None
        seen.add(id(schema))
        own = schema.get("properties")
        found = [own] if isinstance(own, Mapping) else []
        for one in _alternatives(schema, "anyOf", "oneOf", "allOf"):
            found += [inner] if (inner := self._properties(one, seen)) is not None else []
        return {key: value for one in reversed(found) for key, value in one.items()} if found else None

    def _nullable(self, schema: Any, seen: set[int]) -> bool:
        """Return whether a schema allows null, or does not say what it allows."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return not isinstance(schema, Mapping)
        seen.add(id(schema))
        if alternatives := _alternatives(schema, "anyOf", "oneOf"):
            return any(self._nullable(one, seen) for one in alternatives)
        kinds = schema.get("type")
        if kinds is None:
            return None in schema["enum"] if isinstance(schema.get("enum"), list) else True
        return schema.get("nullable") is True or "null" in (kinds if isinstance(kinds, list) else [kinds])


def _alternatives(schema: Mapping[str, Any], *kinds: str) -> list[Any]:
    """The schemas in the lists of these names; one that is malformed says nothing."""
    return [one for kind in kinds if isinstance(schema.get(kind), list) for one in schema[kind]]
