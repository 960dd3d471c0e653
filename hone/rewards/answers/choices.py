"""Answers to questions with options: the letter of an option, with or without what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hone.rewards.answers.words import TEXT

_OPTION = re.compile(
    r"\s?(?:\(\s?([A-Ja-j])\s?\)|([A-J])\s?[).:]|([a-j])\)|([A-J])(?=,?\s(?:because|since)\b))[\s~:.]*"
)
_ANOTHER = re.compile(r"\(\s?[A-J]\s?\)|(?<![A-Za-z])[A-J]\)|^(?:or|and|nor|but)\b")
_LETTERS = re.compile(r"[A-J](?:\s?(?:,|;|and|&)?\s?[A-J]){1,9}")
_CHOSEN = re.compile(r"\b(?:option|choose|choice|pick|select)\s+\(?([A-J])\)?[.!]?$")
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Choice:
    """An option: its letter, and what it says."""

    letter: str
    says: str


def choice(text: str) -> Choice | None:
    """The option that a plain answer gives with its letter; None for a letter alone and for anything else.

    >>> choice("B) 42"), choice("(B) 42 or (C) 43"), choice("B")
    (Choice(letter='B', says='42'), None, None)
    """
    text = _opened(text)
    found = _OPTION.match(text) if len(text) < _LONGEST else None
    if found is None:
        return None
    says = text[found.end() :].strip()
    letter = found[1] or found[2] or found[3] or found[4]
    is_list = says.startswith(",") and not found[4]
    return None if not says or is_list or _ANOTHER.search(says) else Choice(letter.upper(), says)


def chosen(line: str) -> str:
    """The letter after "option", "choose" and the like that ends a line; "" without one.

    >>> chosen("So I choose option C."), chosen("option C is wrong")
    ('C', '')
    """
    found = _CHOSEN.search(line[-_LONGEST:].replace("*", ""))
    return found[1] if found else ""


def letters_of_options(text: str) -> str:
    """Several letters of options in the order of the alphabet, "" for anything else.

    >>> letters_of_options("A, B and D"), letters_of_options("ABD"), letters_of_options("BA"), letters_of_options("A")
    ('ABD', 'ABD', '', '')
    """
    if len(text) > 60 or not _LETTERS.fullmatch(text):
        return ""
    found = "".join(filter(str.isupper, text))
    return found if list(found) == sorted(set(found)) else ""


def _opened(text: str) -> str:
    """A text without the `\\text{...}` around the letter at its beginning."""
    found = TEXT.match(text.lstrip())
    return text if found is None else f"{found[1]} {text.lstrip()[found.end() :].lstrip()}"


__all__ = ["Choice", "choice", "chosen", "letters_of_options"]
