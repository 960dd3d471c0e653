"""Inequalities in one variable as sets of numbers: `x < 2` is the interval `(-\\infty, 2)`.

math-verify compares a single inequality with an interval. It reads `x < -1 or x > 2` as a list of two inequalities, and
`\\{x : x < 2\\}` as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sympy import Basic, Intersection, Set, Union
from sympy.core.relational import Equality, Relational
from sympy.logic.boolalg import And

from hone.rewards.answers.words import letters

_SIGNS = re.compile(r"[<>]|\\(?:le|ge|leq|geq|leqslant|geqslant|lt|gt|ne|neq)(?![a-z])")
_BUILDER = re.compile(
    r"\\?\{\s?[A-Za-z]\s?(?:\\in\s?(?:\\mathbb\s?\{?\s?R\s?\}?|R)\s?)?(?:\\mid\b|\\vert\b|\\colon\b|[|:])(.{1,400})\\?\}"
)
_JOINED = re.compile(r"(?:\\(?:text|textrm|mathrm|mbox)\s?\{\s?(or|and)\s?\}|\\(lor|land|vee|wedge)\b|\b(or|and)\b)")
_ANY = ("or", "lor", "vee")
_MOST = 10  # inequalities of one answer


ParseFn = Callable[[str], tuple[Any, ...]]
"""A formula -> its readings, the best one first."""


@dataclass(frozen=True, slots=True)
class Solutions:
    """The numbers that satisfy inequalities in one variable."""

    numbers: Set
    variable: str


def solutions(text: str, parse: ParseFn) -> Solutions | None:
    """The numbers that satisfy inequalities in one variable, joined by "or" or "and" or not at all.

    None for another text, and for inequalities that sympy cannot solve.
    """
    parts, any_of_them = conditions(text)
    found = [_solved(one, parse) for one in parts]
    solved = [one for one in found if one is not None]
    variables = {one.variable for one in solved}
    if len(variables) != 1 or len(solved) < len(found):
        return None
    joined = Union if any_of_them else Intersection
    return Solutions(joined(*(one.numbers for one in solved)), variables.pop())


def conditions(text: str) -> tuple[list[str], bool]:
    """The inequalities in a text, and whether one of them is enough; none for a text of another form.

    >>> conditions(r"x<1 \\text{ or } x>2"), conditions(r"\\{x : x<2\\}"), conditions("(1, 2)")
    ((['x<1', 'x>2'], True), (['x<2'], False), ([], False))
    """
    bare = text.replace("\\left", "").replace("\\right", "").strip()
    builder = _BUILDER.fullmatch(bare)
    condition = builder[1].rstrip("\\") if builder else bare
    if not _SIGNS.search(condition):
        return [], False
    parts = [one.strip(" ,;") for one in _JOINED.sub("\0", condition).split("\0")]
    kinds = {"".join(joint) in _ANY for joint in _JOINED.findall(condition)}
    return ([], False) if len(kinds) > 1 or len(parts) > _MOST else (parts, kinds == {True})


def _solved(text: str, parse: ParseFn) -> Solutions | None:
    """The solutions of one inequality, or of a chain such as 1 < x < 2."""
    relation = next(iter(parse(text)), None)
    parts = relation.args if isinstance(relation, And) else (relation,)
    if not all(isinstance(part, Relational) and not isinstance(part, Equality) for part in parts):
        return None
    assert isinstance(relation, Basic)
    variables = [letter for letter in letters(text) if letter.lower() in set(map(str, relation.free_symbols))]
    if len(variables) != 1 or len(relation.free_symbols) != 1:
        return None
    try:
        found = relation.as_set()
    except Exception:  # noqa: BLE001  it has no method for this: sympy raises anything
        return None
    return Solutions(found, variables[0]) if isinstance(found, Set) else None


__all__ = ["Solutions", "conditions", "solutions"]
