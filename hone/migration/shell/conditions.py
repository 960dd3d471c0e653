"""Conditions of bash: what is inside of `[ ]` and `[[ ]]`."""

from __future__ import annotations

import fnmatch
from typing import Any

from hone.migration.shell.holes import holes
from hone.migration.shell.words import Words

_ORDER = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def holds(words: Words, node: Any) -> bool | None:
    """Truth of the inside of `[ ]` or `[[ ]]`; None if only running tells."""
    named = [child for child in node.children if child.is_named]
    if node.type == "parenthesized_expression":
        return holds(words, named[0])
    if node.type == "unary_expression":
        sign = node.children[0].text.decode()
        if sign == "!":
            inner = holds(words, node.children[-1])
            return None if inner is None else not inner
        text = words.text(node.children[-1])
        unset = text == "" or holes(text) == [node.children[-1].text.decode().strip('"')]
        return {"-z": unset, "-n": not unset}.get(sign)
    if node.type == "binary_expression":
        return _compared(words, node)
    text = words.text(node)
    return None if holes(text) else text != ""


def _compared(words: Words, node: Any) -> bool | None:
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    sign = node.child_by_field_name("operator").text.decode()
    if sign in ("&&", "-a", "||", "-o"):
        both, either = (holds(words, left), holds(words, right)), sign in ("||", "-o")
        return either if either in both else None if None in both else not either
    a, b = words.text(left), words.text(right)
    if holes(a) or holes(b):
        return None
    if sign in ("=", "==", "!="):
        test = node.parent
        while test is not None and test.type != "test_command":
            test = test.parent
        globs = test is not None and test.children[0].type == "[["
        same = bool(fnmatch.fnmatchcase(a, words.pattern(right)) if globs else a == b)
        return same is (sign != "!=")
    numbers = a.strip().lstrip("-").isdigit() and b.strip().lstrip("-").isdigit()
    return _ORDER[sign](int(a), int(b)) if numbers and sign in _ORDER else None
