"""Inequalities in one variable as sets of numbers: `x < 2` is the interval `(-\\infty, 2)`.

math-verify compares a single inequality with an interval. It reads `x < -1 or x > 2` as a list of two inequalities,
`\\{x : x < 2\\}` as text, and of `So x < 2.` the number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sympy import Basic, Intersection, S, Set, Union
from sympy.core.relational import Equality, Relational
from sympy.logic.boolalg import And

from hone.rewards.answers.words import letters

Kind = Literal["all", "any", "list"]
"""What has to hold of several inequalities: all, at least one, or (in a list) what `solutions` says."""

_SIGNS = re.compile(r"[<>]|\\(?:le|ge|leq|geq|leqslant|geqslant|lt|gt|ne|neq)(?![a-z])")
_BUILDER = re.compile(
    r"\\?\{\s?[A-Za-z]\s?(?:\\in\s?(?:\\mathbb\s?\{?\s?R\s?\}?|R)\s?)?(?:\\mid\b|\\vert\b|\\colon\b|[|:])(.{1,400})\\?\}"
)
_JOINED = re.compile(r"(?:\\(?:text|textrm|mathrm|mbox)\s?\{\s?(or|and)\s?\}|\\(lor|land|vee|wedge)\b|\b(or|and)\b)")
_KINDS: dict[Kind, set[str]] = {"any": {"or", "lor", "vee"}, "all": {"and", "land", "wedge"}}
_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_UNEQUAL = re.compile(r"≠|\\neq?(?![a-z])")  # it may have a list of numbers: x \ne 1,200 says two
_MOST = 10  # inequalities of one answer
_MOST_WORDS, _LONGEST = 60, 600  # of inequalities in running text
_WRITTEN_SIGNS = re.compile(rf"[≤≥≠]|{_SIGNS.pattern}")
_MARKS = frozenset("0123456789<>=≤≥≠^_\\{}()[]+-*/|")  # no word has one


ParseFn = Callable[[str], tuple[Any, ...]]
"""A formula -> its readings, the best one first."""


@dataclass(frozen=True, slots=True)
class Solutions:
    """The numbers that satisfy inequalities in one variable."""

    numbers: Set
    variable: str


def solutions(text: str, parse: ParseFn) -> Solutions | None:
    """The numbers that satisfy inequalities in one variable, joined by "or" or "and", in a list, or alone.

    A list is read as "and", and as "or" where no number satisfies all of it. None for another text, and for
    inequalities that sympy cannot solve.
    """
    parts, kind = conditions(text)
    found = [_solved(one, parse) for one in parts]
    solved = [one for one in found if one is not None]
    variables = {one.variable for one in solved}
    if len(variables) != 1 or len(solved) < len(found):
        return None
    both, either = Intersection(*(one.numbers for one in solved)), Union(*(one.numbers for one in solved))
    listed_apart = kind == "list" and both is S.EmptySet
    return Solutions(either if kind == "any" or listed_apart else both, variables.pop())


def conditions(text: str) -> tuple[list[str], Kind]:
    """The inequalities in a text, and how many of them are to hold; none for a text of another form.

    >>> conditions(r"x<1 \\text{ or } x>2"), conditions(r"\\{x : x<2\\}"), conditions("x>1, x<2"), conditions("(1, 2)")
    ((['x<1', 'x>2'], 'any'), (['x<2'], 'all'), (['x>1', 'x<2'], 'list'), ([], 'all'))
    >>> conditions("x > 1,000"), conditions("x>1,y>2")
    ((['x > 1000'], 'all'), (['x>1', 'y>2'], 'list'))
    """
    bare = text.replace("\\left", "").replace("\\right", "").replace("$", "").strip()
    builder = _BUILDER.fullmatch(bare)
    condition = builder[1].rstrip("\\") if builder else bare
    if not _SIGNS.search(condition):
        return [], "all"
    if not _UNEQUAL.search(condition):
        condition = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), condition)
    joints = {"".join(joint) for joint in _JOINED.findall(condition)}
    listed = [one.strip() for one in _JOINED.sub(",", condition).replace(";", ",").split(",") if one.strip()]
    kinds: set[Kind] = {name for name, words in _KINDS.items() if joints & words}
    if not all(map(_SIGNS.search, listed)):  # a comma within an inequality
        parts = [one.strip(" ,;") for one in _JOINED.sub("\0", condition).split("\0")]
    else:
        parts, kinds = listed, kinds or ({"list"} if len(listed) > 1 else set())
    return ([], "all") if len(kinds) > 1 or len(parts) > _MOST else (parts, kinds.pop() if kinds else "all")


def inequality_at_the_end(text: str) -> str | None:
    """The inequalities in a variable that end a text without dollars; None if it ends otherwise.

    >>> inequality_at_the_end("So x < -1 or x > 2."), inequality_at_the_end("So x < 2, and 4 is none.")
    ('x < -1 or x > 2', None)
    """
    kept: list[str] = []
    for word in reversed(text[-_LONGEST:].replace("$", " ").replace("*", " ").split()[-_MOST_WORDS:]):
        name = "".join(filter(str.isalpha, word))
        if len(name) > 1 and name not in ("or", "and") and _MARKS.isdisjoint(word):
            break
        kept.append(word)
    found = " ".join(reversed(kept)).strip(" .,;:")
    while found.startswith(("or ", "and ")):
        found = found.partition(" ")[2]
    return found if _WRITTEN_SIGNS.search(found) and letters(_JOINED.sub(" ", found)) else None


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


__all__ = ["Solutions", "conditions", "inequality_at_the_end", "solutions"]
