"""Expansion of bash words: variables and their operators, arrays, arithmetic, quotes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.migration.shell.arithmetic import Unknown, evaluated
from hone.migration.shell.holes import hole, holes, split

Value = str | list[str]
Pieces = Iterator[tuple[Sequence[str], bool]]  # (words, quoted): several words only for an array

MAX_CHARACTERS = 1_000_000
"""Longest value of a variable: a loop that doubles one ends here."""

MAX_TRIMMED = 4_000
"""Longest value that is trimmed: each of its prefixes is compared with the pattern."""

_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_SLASH = re.compile(rb"(?<!\\)/")  # between the pattern and the replacement of `${X/pattern/new}`
_ESCAPED_IN_STRING = re.compile(r"\\([$`\"\\\n])")
_LITERAL = ("word", "number", "extglob_pattern", "regex", "variable_name", "test_operator", "brace_expression")
_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")
_TRIMS = ("#", "##", "%", "%%")
_CASES: Mapping[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


class TooLong(Exception):
    """A script that makes values or runs of statements without bound."""


@dataclass(slots=True)
class Scope:
    """Variables of a script, and the arguments that it was started with."""

    variables: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    def get(self, name: str) -> Value | None:
        """Value of a variable or a positional parameter; None if it is not set."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name.isdigit() and name != "0":
            place = int(name) - 1
            return self.arguments[place] if place < len(self.arguments) else ""
        return self.variables.get(name)

    def put(self, name: str, value: Value) -> None:
        """Set a variable. Raises TooLong."""
        if sum(map(len, value)) > MAX_CHARACTERS:
            raise TooLong(f"{name} has more than {MAX_CHARACTERS:,} characters")
        self.variables[name] = value


class Words:
    """Text of the nodes of a syntax tree in a scope."""

    def __init__(self, scope: Scope, source: bytes, parse: Callable[[bytes], Any]) -> None:
        self.scope = scope
        self.source = source
        self.parse = parse

    def fields(self, node: Any) -> list[str]:
        """Return the words that a word of the script becomes: none, one, or several."""
        words: list[str] = []
        current: str | None = None
        for values, quoted in self._pieces(node, quoted=False):
            parts = list(values) if quoted else [part for value in values for part in split(value)]
            if not parts:
                continue
            glued = quoted or not values[0][:1].isspace()
            if current is not None and glued:
                parts[0] = current + parts[0]
            elif current is not None:
                words.append(current)
            words.extend(parts[:-1])
            current = parts[-1]
        return words if current is None else [*words, current]

    def text(self, node: Any) -> str:
        """Return the text of a word as one value, as in an assignment."""
        return "".join(" ".join(values) for values, _ in self._pieces(node, quoted=True))

    def _pieces(self, node: Any, quoted: bool) -> Pieces:
        kind, text = node.type, node.text.decode()
        if kind in ("string", "concatenation", "translated_string"):
            inner = quoted or kind != "concatenation"
            inside = (node.start_byte + 1, node.end_byte - 1) if kind == "string" else (node.start_byte, node.end_byte)
            yield from self._span(*inside, node.children, inner)
            if inside[0] == inside[1]:
                yield [""], True
        elif kind == "heredoc_body":
            for words, quoted in self._span(node.start_byte, node.end_byte, node.children, quoted=True):
                yield [word.replace("\\\n", "") for word in words], quoted
        elif kind in ("string_content", "heredoc_content"):
            yield [_ESCAPED_IN_STRING.sub(lambda found: found[1].strip("\n"), text)], True
        elif kind == "raw_string":
            yield [text[1:-1]], True
        elif kind == "ansi_c_string":
            yield [text[2:-1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'")], True
        elif kind in ("simple_expansion", "expansion"):
            before = text[: text.index("$")]  # the parser counts spaces before a variable in a string as its part
            yield [before] if before else [], True
            yield self._variable(node), quoted
        elif kind == "arithmetic_expansion":
            yield [self._arithmetic(node)], quoted
        elif kind in _LITERAL:
            yield [_ESCAPED.sub(lambda found: found[1].strip("\n"), text)], True
        elif kind == "command_substitution" and text.startswith("$(("):  # so the parser names $((1 + 2)) in ${X:-...}
            inside = self.parse(text.encode()).root_node.children
            while inside and inside[0].type in ("command", "command_name"):
                inside = inside[0].children
            known = bool(inside) and inside[0].type == "arithmetic_expansion"
            yield [self._arithmetic(inside[0]) if known else hole(text)], quoted
        else:  # command and process substitutions, and what this reader does not know
            yield [hole(text)], True

    def _span(self, start: int, end: int, children: Sequence[Any], quoted: bool) -> Pieces:
        """Pieces of a stretch of the source: nodes, and the text between them, which has no node."""
        for child in children:
            if child.start_byte < start or child.end_byte > end:
                continue
            if child.start_byte > start:
                yield [self.source[start : child.start_byte].decode()], True
            yield from self._pieces(child, quoted) if child.is_named else iter([([child.text.decode()], True)])
            start = child.end_byte
        if start < end:
            yield [self.source[start:end].decode()], True

    # ------------------------------------------------------------------------------------------------ variables

    def _variable(self, node: Any) -> list[str]:
        """Words of `$X`, `${X:-default}`, `${A[@]}` and the like."""
        children = [child for child in node.children if child.type not in ("$", " $", "${", "}")]
        length = bool(children) and children[0].type == "#" and len(children) > 1
        if not children or children[0].type == "!":
            return [hole(node.text.decode().strip())]
        children = children[1:] if length else children
        value = self._looked_up(children[0])
        operand = children[1:]
        if length:
            return [hole(node.text.decode())] if value is None else [str(len(value))]
        if operand:
            value = self._operated(node, value, operand[0])
        if value is None:
            return [hole(node.text.decode().strip())]
        if isinstance(value, list) and not self._whole(children[0]):
            return value[:1]
        return value if isinstance(value, list) else [value]

    def _looked_up(self, name: Any) -> Value | None:
        """Value of a name or of an array's element; None if it is not set."""
        if name.type != "subscript":
            return self.scope.get(name.text.decode().strip())
        value = self.scope.get(name.child_by_field_name("name").text.decode())
        place = self.text(name.child_by_field_name("index"))
        if place in ("@", "*") or value is None:
            return [value] if isinstance(value, str) else value
        items = [value] if isinstance(value, str) else value
        return items[int(place)] if place.lstrip("-").isdigit() and int(place) < len(items) else None

    @staticmethod
    def _whole(name: Any) -> bool:
        """Return whether a name stands for all elements: `A[@]`, or the script's arguments."""
        return name.type == "subscript" or name.text.decode().strip() in ("@", "*")

    def _operated(self, node: Any, value: Value | None, operator: Any) -> Value | None:
        """Value after an operator of `${X...}`; None if it cannot be told."""
        sign = operator.type
        rest = [child for child in node.children if child.start_byte >= operator.end_byte and child.type != "}"]
        start, end = operator.end_byte, node.end_byte - 1

        def between(first: int, last: int) -> str:
            return "".join(" ".join(words) for words, _ in self._span(first, last, rest, quoted=True))

        if sign in ("/", "//"):
            slash = _SLASH.search(self.source, start, end)
            pattern = between(start, slash.start() if slash else end)
            new = between(slash.end(), end) if slash else ""
            return self._replaced(value, _ESCAPED.sub(lambda found: found[1], pattern), new, sign)
        operand = between(start, end)
        if sign in _DEFAULTS:
            return self._default(node, sign, value, operand)
        if value is None:
            return None
        if isinstance(value, list):
            return [self._changed(sign, one, operand) or "" for one in value]
        return self._changed(sign, value, operand)

    def _default(self, node: Any, sign: str, value: Value | None, operand: str) -> Value | None:
        there = value is not None and (value != "" or ":" not in sign)
        if sign in (":+", "+"):
            return operand if there else ""
        if there:
            return value
        if sign in (":=", "="):
            name = next(child for child in node.children if child.type == "variable_name")
            self.scope.put(name.text.decode(), operand)
        return None if "?" in sign else operand

    @staticmethod
    def _replaced(value: Value | None, pattern: str, new: str, sign: str) -> Value | None:
        """Each text of a value with the first part, or all, that equals a pattern replaced."""
        if isinstance(value, list):
            return [str(Words._replaced(one, pattern, new, sign)) for one in value]
        if value is None or holes(value):
            return None if value is None else hole(f"{value}, with {pattern} replaced")
        return value.replace(pattern, new, -1 if sign == "//" else 1) if pattern else value

    @staticmethod
    def _changed(sign: str, value: str, operand: str) -> str | None:
        """A value after trimming, replacement, case or substring; None if the operator is not known."""
        if holes(value):
            return hole(f"{value}, changed by {sign}{operand}")
        if sign in _TRIMS:
            return _trimmed(value, operand, from_end=sign[0] == "%", longest=len(sign) == 2)
        if sign in _CASES:
            return _CASES[sign](value)
        if sign == ":":
            start, _, length = operand.replace(" ", "").partition(":")
            if start.lstrip("-").isdigit() and (not length or length.isdigit()):
                tail = value[int(start) :]
                return tail[: int(length)] if length else tail
        return None

    def _arithmetic(self, node: Any) -> str:
        try:
            return str(evaluated(node, self.number))
        except Unknown:
            return hole(node.text.decode())

    def number(self, node: Any) -> int:
        """Value of a variable in arithmetic: an unset one is 0, as in bash. Raises arithmetic.Unknown."""
        if node.type == "variable_name":
            value = self.scope.get(node.text.decode())
            text = "0" if value is None else value if isinstance(value, str) else (value or ["0"])[0]
        else:
            text = self.text(node)
        try:
            return int(text.strip() or "0", 0)
        except ValueError as error:
            raise Unknown(text) from error


def _trimmed(value: str, pattern: str, *, from_end: bool, longest: bool) -> str:
    """A value without its shortest or longest part that matches a glob, at its start or its end."""
    if len(value) > MAX_TRIMMED:
        return hole(f"a long value without {pattern}")
    matches = re.compile(fnmatch.translate(pattern)).match
    cuts = range(len(value) + 1)
    parts = [(value[cut:], value[:cut]) if from_end else (value[:cut], value[cut:]) for cut in cuts]
    fitting = [(part, kept) for part, kept in parts if matches(part)]
    if not fitting:
        return value
    best = max if longest else min
    return best(fitting, key=lambda pair: len(pair[0]))[1]
