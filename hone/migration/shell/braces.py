"""Brace expansion of bash: `{a,b}` and `{1..3}` in the text of a word, before anything else of it is expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

_SEQUENCE = re.compile(r"([-+]?\d+|[a-z]|[A-Z])\.\.([-+]?\d+|[a-z]|[A-Z])(?:\.\.([-+]?\d+))?")
_CHARACTERS = re.compile(r"\\.|.", re.DOTALL)
_PADDED = re.compile(r"-?0\d")
_WHOLE = (
    "string",
    "raw_string",
    "ansi_c_string",
    "translated_string",
    "expansion",
    "simple_expansion",
    "command_substitution",
    "process_substitution",
    "arithmetic_expansion",
)
"""Kinds of nodes whose braces and commas are no signs of an expansion."""


def tokens_of(node: Any) -> list[str]:
    """Return the text of a word in parts: characters, escaped ones, and quoted or expanded parts as one each."""
    if node.type in _WHOLE:
        return [node.text.decode()]
    if not node.children:
        return _CHARACTERS.findall(node.text.decode())
    tokens, text, at = [], node.text, node.start_byte
    for child in node.children:
        between = text[at - node.start_byte : child.start_byte - node.start_byte]
        tokens += [*_CHARACTERS.findall(between.decode()), *tokens_of(child)]
        at = child.end_byte
    return [*tokens, *_CHARACTERS.findall(text[at - node.start_byte :].decode())]


def expanded(tokens: Sequence[str]) -> Iterator[str]:
    """Yield the texts that a word becomes: its own, if it has no braces that bash expands."""
    for at, token in enumerate(tokens):
        end = _closing(tokens, at) if token == "{" else 0
        parts = _parts(tokens[at + 1 : end]) if end else None
        if parts is not None:
            for part in parts:
                for rest in expanded(tokens[end + 1 :]):
                    yield "".join(tokens[:at]) + part + rest
            return
    yield "".join(tokens)


def _closing(tokens: Sequence[str], start: int) -> int:
    """Place of the brace that closes the one at `start`; 0 if there is none."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += {"{": 1, "}": -1}.get(tokens[at], 0)
        if depth == 0:
            return at
    return 0


def _parts(inside: Sequence[str]) -> Iterator[str] | None:
    """Texts that stand for what is between braces; None if bash leaves it as it is."""
    depth, commas = 0, []
    for at, token in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token == "," and depth == 0:
            commas.append(at)
    if commas:
        ends = zip([0, *(at + 1 for at in commas)], [*commas, len(inside)], strict=True)
        return (text for first, last in ends for text in expanded(inside[first:last]))
    found = _SEQUENCE.fullmatch("".join(inside))
    if found is None:
        return None
    first, last, step = found[1], found[2], abs(int(found[3] or 1)) or 1
    if first.isalpha() and last.isalpha() and first.islower() == last.islower():
        return (chr(one) for one in _range(ord(first), ord(last), step))
    if first.isalpha() or last.isalpha():
        return None
    width = max(len(first), len(last)) if _PADDED.match(first) or _PADDED.match(last) else 0
    return (f"{one:0{width}d}" for one in _range(int(first), int(last), step))


def _range(first: int, last: int, step: int) -> range:
    return range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
