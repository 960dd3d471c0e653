"""Expansion of bash words: variables and their operators, arrays, arithmetic, quotes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hone.migration.shell.arithmetic import Unknown, Variables, evaluated, number
from hone.migration.shell.braces import expanded, tokens_of
from hone.migration.shell.holes import hole, holes, split

Value = str | list[str]
Pieces = Iterator[tuple[Sequence[str], bool]]  # (words, quoted): several words only for an array

MAX_CHARACTERS = 1_000_000
"""Longest value of a variable: a loop that doubles one ends here."""

MAX_TRIMMED = 4_000
"""Longest value that is trimmed: each of its prefixes is compared with the pattern."""

MAX_WORDS = 20_000
"""Most words that the braces of one word make."""

_STAR = re.compile(r"\s*\$(\*|\{\*|\{\w+\[\*\])")
_HOME = re.compile(r"(^|=)~(?=/|$)")
_PATTERN = re.compile(r"(?<!\\)[*?\[]")
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
    given: Mapping[str, str] = field(default_factory=dict)
    """Values of variables that a person gives, for where only running tells one."""

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
        """Return the words that a word of the script becomes: none, one, or several. Raises TooLong."""
        if node.type not in ("concatenation", "brace_expression", "word"):
            return self._split(node)
        texts = list(islice(expanded(tokens_of(node)), MAX_WORDS + 1))
        if len(texts) > MAX_WORDS:
            raise TooLong(f"{node.text.decode()[:80]} is more than {MAX_WORDS:,} words")
        return (
            self._split(node) if texts == [node.text.decode()] else [one for text in texts for one in self._word(text)]
        )

    def _word(self, text: str) -> list[str]:
        """Return the words of one text that brace expansion made of a word."""
        source = f": {text}".encode()
        nodes = self.parse(source).root_node.children
        parts = nodes[0].children[1:] if len(nodes) == 1 and nodes[0].type == "command" else []
        if len(parts) != 1 or nodes[0].has_error:
            return [hole(text)] if text else []
        return Words(self.scope, source, self.parse)._split(parts[0])

    def _split(self, node: Any) -> list[str]:
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
            in_string = node.parent.type == "expansion" and node.parent.parent.type == "string"
            yield [text if in_string else text[1:-1]], True
        elif kind == "word" and _HOME.search(text) and not quoted and _begins(node):
            value = self.scope.get("HOME")
            home = value if isinstance(value, str) else hole("$HOME")
            yield (
                [_HOME.sub(lambda found: found[1] + home, _ESCAPED.sub(lambda found: found[1].strip("\n"), text))],
                True,
            )
        elif kind == "ansi_c_string":
            yield [text[2:-1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'")], True
        elif kind in ("simple_expansion", "expansion"):
            before = text[: text.index("$")]  # the parser counts spaces before a variable in a string as its part
            yield [before] if before else [], True
            words = self._variable(node)
            if quoted and _STAR.match(text):  # "${A[*]}" is one word
                first = self.scope.get("IFS")
                words = [(" " if first is None else first[:1] if isinstance(first, str) else " ").join(words)]
            yield words, quoted or self._is_quoted_default(node)
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
            if isinstance(value, list) and not self._whole(children[0]):
                value = value[0] if value else ""
            known = value is not None and not (isinstance(value, str) and holes(value))
            return [str(len(value or ""))] if known else [hole(node.text.decode())]
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
            if _PATTERN.search(pattern):
                return hole(node.text.decode().strip())
            return _replaced(value, _ESCAPED.sub(lambda found: found[1], pattern), new, sign)
        operand = between(start, end)
        if sign in _DEFAULTS:
            return self._default(node, sign, value, operand)
        if value is None:
            return None
        if isinstance(value, list) and sign == ":":
            first = 1 if node.text.startswith((b"${@", b"${*")) else 0  # $0 is the script's name
            return _sliced(value, operand, first)
        if isinstance(value, list):
            changed = [_changed(sign, one, operand) for one in value]
            return None if None in changed else [one for one in changed if one is not None]
        return _changed(sign, value, operand)

    def _default(self, node: Any, sign: str, value: Value | None, operand: str) -> Value | None:
        name = node.children[1].text.decode()
        set_ = value is not None and not (name.isdigit() and name != "0" and int(name) > len(self.scope.arguments))
        there = set_ and value != [] and (value not in ("", [""]) or ":" not in sign)
        if sign in (":+", "+"):
            return operand if there else ""
        if there:
            return value
        if sign in (":=", "="):
            variable = next(child for child in node.children if child.type == "variable_name")
            self.scope.put(variable.text.decode(), operand)
        return None if "?" in sign else operand

    def _arithmetic(self, node: Any) -> str:
        try:
            return str(self.computed(node))
        except Unknown:
            return hole(node.text.decode())

    def computed(self, node: Any) -> int:
        """Compute `$((...))` or `((...))`. Raises arithmetic.Unknown."""
        return evaluated(self._expanded(node), Variables(self._number, self._put_number))

    def _expanded(self, node: Any) -> str:
        """Text of an expression with each `$X` replaced by its value, as bash does before it computes."""
        first, text = node.start_byte, ""  # a default's expression is parsed on its own: its text is not of the source
        at, end = node.children[0].end_byte - first, node.children[-1].start_byte - first
        left = list(reversed(node.children))
        while left:
            one = left.pop()
            if one.type in ("simple_expansion", "expansion", "string", "command_substitution", "arithmetic_expansion"):
                text += node.text[at : one.start_byte - first].decode() + self.text(one)
                at = one.end_byte - first
            else:
                left.extend(reversed(one.children))
        return text + str(node.text[at:end].decode())

    def _number(self, name: str) -> int:
        """Value of a variable in arithmetic: an unset one is 0, as in bash. Raises arithmetic.Unknown."""
        value = self.scope.get(name)
        text = "0" if value is None else value if isinstance(value, str) else (value or ["0"])[0]
        return number(text.strip() or "0")

    def _put_number(self, name: str, value: int) -> None:
        self.scope.put(name, str(value))

    def pattern(self, node: Any) -> str:
        """Return a word as a glob in which what is quoted stands for itself."""
        if node.type in ("string", "raw_string"):
            return _literally(self.text(node))
        if node.type == "concatenation":
            return "".join(self.pattern(child) for child in node.children)
        return self.text(node)

    def _is_quoted_default(self, node: Any) -> bool:
        """Return whether `${X:-"a b"}` has the value of its quoted default, which is not split."""
        children = node.children
        if len(children) != 5 or children[3].type not in ("string", "raw_string"):
            return False
        sign, value = children[2].type, self._looked_up(children[1])
        return bool(sign in (":-", "-") and (value is None or (value == "" and sign == ":-")))


def _replaced(value: Value | None, pattern: str, new: str, sign: str) -> Value | None:
    """Each text of a value with the first part, or all, that equals a pattern replaced."""
    if isinstance(value, list):
        return [str(_replaced(one, pattern, new, sign)) for one in value]
    if value is None or holes(value):
        return None if value is None else hole(f"{value}, with {pattern} replaced")
    return value.replace(pattern, new, -1 if sign == "//" else 1) if pattern else value


def _changed(sign: str, value: str, operand: str) -> str | None:
    """A value after trimming, replacement, case or substring; None if the operator is not known."""
    if holes(value):
        return hole(f"{value}, changed by {sign}{operand}")
    if sign in _TRIMS:
        return _trimmed(value, operand, from_end=sign[0] == "%", longest=len(sign) == 2)
    if sign in _CASES and not operand:
        return _CASES[sign](value)
    if sign in ("/#", "/%") and not _PATTERN.search(operand):
        old, _, new = operand.partition("/")
        if sign == "/#":
            return new + value.removeprefix(old) if value.startswith(old) else value
        return value.removesuffix(old) + new if value.endswith(old) else value
    if sign == ":":
        start, _, length = operand.replace(" ", "").partition(":")
        if start.lstrip("-").isdigit() and (not length or length.isdigit()):
            tail = value[int(start) :]
            return tail[: int(length)] if length else tail
    return None


def _literally(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


def _begins(node: Any) -> bool:
    """Return whether a node is the beginning of a word, or all of it."""
    return bool(node.parent.type != "concatenation" or node.parent.children[0].start_byte == node.start_byte)


def _sliced(value: list[str], operand: str, first: int) -> list[str] | None:
    """Elements of an array from a place on, at most so many; None if that cannot be told."""
    start, separator, length = operand.replace(" ", "").partition(":")
    if not start.lstrip("-").isdigit() or (separator and not length.isdigit()):
        return None
    place = int(start) - (first if int(start) > 0 else 0)
    if int(start) == 0 and first:
        return None
    if place < 0:
        place += len(value)
        if place < 0:
            return []
    return value[place : place + int(length)] if separator else value[place:]


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
