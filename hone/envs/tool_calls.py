"""Content, thought and tool calls of an answer, found by the parser of its model's family.

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>        Qwen 2.5 and 3, Hermes
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    llama3        {"name": "add", "parameters": {"a": 1}}, also after <|python_tag|>
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add[ARGS]{"a": 1}
    pythonic      [add(a=1), add(a=2)]                                                  Llama 4

The policy wrote the text, so it may be anything: a parser takes time linear in its length and raises nothing. A call
that is cut off or malformed is a call with an error, never a final answer.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from hone.config import ConfigError
from hone.envs import PARSERS
from hone.processes.untrusted_json import DEEPEST, parse_json


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the policy wrote it."""

    name: str = ""  # empty if none can be read
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""  # as written, with its marks
    error: str = ""  # what is wrong with a broken call


@dataclass(frozen=True, slots=True)
class Said:
    """One completion as an environment reads it. Said("So:", thought="3 and 4", calls=(Call("add", {"a": 3}),))."""

    content: str  # without thought, calls and special tokens
    thought: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def whole(self) -> bool:
        """Return whether no call is broken."""
        return not any(call.error for call in self.calls)


ParseFn = Callable[[str], tuple[str, tuple[Call, ...]]]
"""Text with its special tokens -> (the text without calls, the calls)."""

# What a chat template renders around a call -> the parser of that form; the first that is found counts.
_FORMS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_start|>": "pythonic",
    "<|python_tag|>": "llama3",
}
# parser -> the text with which a call begins, and the one with which a call of the tool {name} begins
_OPENINGS = {
    "hermes": ("<tool_call>\n", '<tool_call>\n{"name": "{name}", "arguments":'),
    "qwen3_coder": ("<tool_call>\n", "<tool_call>\n<function={name}>\n"),
    "mistral": ("[TOOL_CALLS]", ""),  # its two forms name the tool differently
    "llama3": ('{"name":', '{"name": "{name}", "parameters":'),
    "pythonic": ("[", "[{name}("),
}
_THINK, _END_THINK = "<think>", "</think>"
_LONGEST_EXPRESSION = 20_000  # characters of a pythonic call
_LARGEST_INTEGER = 10**1000  # Python's own limit, of 4,300 digits in a text, may be lifted for a process


def split_thought(text: str) -> tuple[str, str]:
    """(thought, the rest) of a text with `<think>` marks; a thought that does not end is all of the text.

    >>> split_thought("<think>two and two</think>4"), split_thought("4")
    (('two and two', '4'), ('', '4'))
    """
    before, found, after = text.partition(_END_THINK)
    if found:
        return before.strip().removeprefix(_THINK).strip(), after.lstrip("\n")
    if text.lstrip().startswith(_THINK):
        return text.strip().removeprefix(_THINK).strip(), ""
    return "", text


# ------------------------------------------------------------------------------------------------------- the parsers


def hermes(text: str) -> tuple[str, tuple[Call, ...]]:
    """Calls as JSON between `<tool_call>` and `</tool_call>`."""
    return _between(text, _json_call)


def qwen3_coder(text: str) -> tuple[str, tuple[Call, ...]]:
    """Calls as `<function=NAME>` and `<parameter=NAME>` between `<tool_call>` marks; all arguments are text."""
    return _between(text, _tagged_call)


def llama3(text: str) -> tuple[str, tuple[Call, ...]]:
    """JSON objects, separated by `;`, after `<|python_tag|>` or as the whole text."""
    before, tagged, after = text.partition("<|python_tag|>")
    written = (after if tagged else before).strip()
    if not tagged and not re.match(r'\{\s*"(?:name|type)"\s*:', written):
        return text, ()
    calls = tuple(_json_call(one, one, "parameters") for one in _objects(written))
    return before.strip() if tagged else "", calls or (Call(text=written, error="there is no JSON object"),)


def mistral(text: str) -> tuple[str, tuple[Call, ...]]:
    """After each `[TOOL_CALLS]`: a JSON list of calls, or a name, `[ARGS]` and a JSON object."""
    content, *written = text.split("[TOOL_CALLS]")
    return content.strip() if written else text, tuple(call for one in written for call in _mistral_calls(one.strip()))


def pythonic(text: str) -> tuple[str, tuple[Call, ...]]:
    """A Python list of function calls with named arguments, as the whole text."""
    written = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_]\w*\(", written):
        return text, ()
    try:
        return "", tuple(_python_calls(written))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        name = re.match(r"\[\s*(\w+)", written)
        return "", (Call(name[1] if name else "", {}, written, f"not a list of calls: {_short(error)}"),)


def no_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    """Every text is content."""
    return text, ()


# ----------------------------------------------------------------------------------------------------------- parts


def _between(text: str, read: Callable[[str, str], Call]) -> tuple[str, tuple[Call, ...]]:
    """Calls between `<tool_call>` marks, in linear time; the last one may lack its end."""
    opening, closing = "<tool_call>", "</tool_call>"
    left: list[str] = []
    calls: list[Call] = []
    at = 0
    while (begin := text.find(opening, at)) >= 0:
        left.append(text[at:begin])
        end = text.find(closing, begin)
        if end < 0:
            body = text[begin + len(opening) :]
            calls.append(Call(_name_in(body), {}, text[begin:], f"{closing} is missing"))
            at = len(text)
            break
        at = end + len(closing)
        calls.append(read(text[begin + len(opening) : end], text[begin:at]))
    left.append(text[at:])
    return ("".join(left).strip() if calls else text), tuple(calls)


def _json_call(body: str, written: str, key: str = "arguments") -> Call:
    """A call as a JSON object with a name and `key`."""
    try:
        call = parse_json(body)
    except ValueError as error:
        return Call(_name_in(body), {}, written, f"not JSON: {_short(error)}")
    return _checked(call, written, key)


def _checked(call: Any, written: str, key: str = "arguments") -> Call:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return Call("", {}, written, 'a call should be an object with "name" (text) and "arguments"')
    arguments = call.get(key, call.get("arguments", {}))
    if isinstance(arguments, str):  # some models write the object as text
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return Call(call["name"], {}, written, f"arguments are not JSON: {_short(error)}")
    if not isinstance(arguments, dict):
        return Call(call["name"], {}, written, f"{key} should be an object, found {type(arguments).__name__}")
    return _sendable(call["name"], arguments, written)


def _sendable(name: str, arguments: Mapping[str, Any], written: str) -> Call:
    """A call that protocols can carry: escapes of JSON may write half a character, and numbers beyond any float."""
    try:
        _check_integers(arguments)
        json.dumps({name: arguments}, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Call("", {}, written, "it has half a character, such as \\ud800 without its other half")
    except ValueError as error:
        large = isinstance(error, _LargeInteger)
        return Call(name, {}, written, f"arguments have {error if large else 'a number that is not finite'}")
    return Call(name, arguments, written)


class _LargeInteger(ValueError):
    """An integer that takes long to write and read."""


def _check_integers(value: Any) -> None:
    """Raises _LargeInteger for an integer of more than 1,000 digits, at any depth."""
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise _LargeInteger("an integer of more than 1,000 digits")
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        for one in value:
            _check_integers(one)


def _tagged_call(body: str, written: str) -> Call:
    function = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
    if function is None:
        return Call("", {}, written, "<function=NAME> ... </function> is missing")
    arguments: dict[str, str] = {}
    for part in function[2].split("<parameter=")[1:]:
        name, opened, value = part.partition(">")
        value, closed, _ = value.rpartition("</parameter>")
        if not opened or not closed:
            return Call(function[1], {}, written, "a <parameter=NAME> is not closed")
        arguments[name] = value.removeprefix("\n").removesuffix("\n")
    name = function[1].strip()
    return Call(name, arguments, written, "" if name else "the name in <function=NAME> is missing")


def _mistral_calls(written: str) -> Iterator[Call]:
    marked = f"[TOOL_CALLS]{written}"
    if written.startswith("["):
        try:
            listed = parse_json(written)
        except ValueError as error:
            yield Call(_name_in(written), {}, marked, f"not JSON: {_short(error)}")
            return
        yield from (_checked(one, marked) for one in listed or [None])
        return
    name, _, arguments = written.partition("[ARGS]") if "[ARGS]" in written else written.partition("{")
    body = arguments if "[ARGS]" in written else "{" + arguments
    name = name.partition("[CALL_ID]")[0].strip()
    yield _json_arguments(name, body, marked)


def _json_arguments(name: str, body: str, written: str) -> Call:
    try:
        arguments = parse_json(body)
    except ValueError as error:
        return Call(name, {}, written, f"arguments are not JSON: {_short(error)}")
    return _checked({"name": name, "arguments": arguments}, written)


def _python_calls(written: str) -> Iterator[Call]:
    """Read a list of calls whose arguments are literals; nothing is evaluated."""
    depth = deepest = 0
    for character in written:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST or len(written) > _LONGEST_EXPRESSION:
        raise ValueError("it is too long or too deep")
    written = written.replace("\r\n", "\n").replace("\r", "\n")  # as `ast` counts lines
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python, about the policy's text
        tree = ast.parse(written, mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("found no list")
    text = written.encode()
    begins = [0, *accumulate(len(line) + 1 for line in text.split(b"\n"))]
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
            raise ValueError("a call is written as name(argument=value, ...)")
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = begins[node.end_lineno - 1] + node.end_col_offset
        source = text[begins[node.lineno - 1] + node.col_offset : end].decode()
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
        _check_integers(arguments)
        # through JSON, so that arguments are what JSON can carry, whichever parser read them
        arguments = parse_json(json.dumps(arguments))
        yield _sendable(ast.unparse(node.func), arguments, f"[{source}]")


def _objects(written: str) -> Iterator[str]:
    """The JSON objects of a text one after another; what is left at the end is the last, if anything is."""
    start, depth, text = 0, 0, False
    escaped = False
    for place, character in enumerate(written):
        if text:
            text = escaped or character != '"'
            escaped = character == "\\" and not escaped
            continue
        text = character == '"'
        depth += (character == "{") - (character == "}")
        if character == "}" and depth == 0:
            yield written[start : place + 1].strip(" ;\n")
            start = place + 1
    if rest := written[start:].strip(" ;\n"):
        yield rest


def _name_in(body: str) -> str:
    """The name in a call that cannot be read whole."""
    found = re.search(r'"name"\s{0,8}:\s{0,8}"([^"\\]{1,128})"|<function=([^>\n]{1,128})>', body[:1000])
    return (found[1] or found[2]) if found else ""


def _short(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:200]


def parser_of(name: str, template: str) -> ParseFn:
    """The tool-call parser `name`; "auto" finds it in the text of the chat template.

    Raises UnknownName for an unknown parser, ConfigError if the template has no form of calls that hone knows.
    """
    if name == "auto":
        found = next((parser for form, parser in _FORMS.items() if form in template), None)
        if found is None:
            raise ConfigError(
                f"episode.env.parser: the chat template renders tool calls in no form that hone knows; name a parser "
                f"({', '.join(PARSERS)}), or register your own in hone.envs.PARSERS"
            )
        name = found
    parse: ParseFn = PARSERS.get(name)
    return parse


def opening_of(parse: ParseFn, tool: str = "") -> str:
    """The text with which an answer that has to be a call begins; with `tool`, a call of this tool.

    Raises ValueError for a parser that has no such text.

    >>> opening_of(hermes, "add")
    '<tool_call>\\n{"name": "add", "arguments":'
    """
    of_any, of_one = _OPENINGS.get(getattr(parse, "__name__", ""), ("", ""))
    opening = of_one.replace("{name}", tool) if tool else of_any
    if not opening:
        wanted = f"a call of {tool}" if tool else "a call"
        raise ValueError(f"tool_choice asks for {wanted}, and the format of this model's tool calls has no fixed start")
    return opening


def arguments_text(call: Call) -> str:
    """The arguments as JSON text, as protocols carry them."""
    return json.dumps(call.arguments, ensure_ascii=False, default=str)


__all__ = [
    "Call",
    "ParseFn",
    "Said",
    "arguments_text",
    "hermes",
    "no_calls",
    "opening_of",
    "parser_of",
    "split_thought",
]
