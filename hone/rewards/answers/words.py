"""Answers in words: compared without case, and told from products of variables."""

from __future__ import annotations

import re
import unicodedata

CLOCK = re.compile(r"(?<![\d:.])\d{1,2}(?::\d{2}){1,2}(?![\d:])")
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_NOON = re.compile(r"(?<![^\W\d_])([apAP])\.\s?[mM]\b")  # a.m. and p.m.
_DATE = re.compile(r"(?<![\d.-])\d{4}-\d{2}-\d{2}(?![\d.-]\d)")
_LETTERS = re.compile(r"[^\W\d_]+")
_COMMANDS = re.compile(r"\\[A-Za-z]+(?:\s?\{[A-Za-z ]{2,80}\})?")
_FUNCTIONS = frozenset(  # names that are no words of a formula
    ("arccos", "arcsin", "arctan", "arg", "cos", "cosh", "cot", "csc", "det", "dim", "exp", "gcd", "inf", "lcm", "lim")
) | frozenset(("log", "max", "min", "mod", "sec", "sin", "sinh", "sup", "tan", "tanh"))
_JOINING = frozenset(("and", "or"))  # between formulas, too
_SHORT = frozenset(("no", "ok", "am", "pm", "up", "on", "in", "us")) | _JOINING
_CHOICES = frozenset("abcdefghij")  # names of options, in either case; later letters are variables


def clocks(text: str) -> list[str]:
    """The times of a day in a text, in order."""
    return [match[0] for match in CLOCK.finditer(text)]


def dates(text: str) -> list[str]:
    """The dates in a text that are written as 2024-01-05."""
    return _DATE.findall(text)


def words(text: str) -> str:
    """A text for comparison as words: without case, `\\text`, punctuation at its ends and superfluous spaces.

    Of a formula, whose case and signs mean something, only the spaces are normal: `5!` is not 5, and `f'` not f.

    >>> words(r"\\text{The  North Pole}."), words("(A)"), words("N + 5!"), words("Apollo 11!"), words("2X")
    ('the north pole', 'a', 'N + 5!', 'apollo 11', '2X')
    """
    text = unicodedata.normalize("NFC", unwrapped_words(text))
    text = " ".join(text.replace("\\ ", " ").replace("~", " ").split()).strip(" .,;:")
    text = _NOON.sub(r"\1m", text)
    named = any(map(_is_name, _LETTERS.findall(text)))
    if re.search(r"[\\^_=<>*|{}]|\+\s?\w", text) or (not named and re.search(r"[^\W_][!'’]", text)):
        return text
    bare = text.strip(" .,;:!\"'")
    if not named and not all(map(_has_no_case, re.findall(r"\w+", bare))):
        return bare
    bare = re.sub(r"\s?-\s?", "-", bare.casefold())
    return bare[1:-1] if re.fullmatch(r"\([a-z]\)", bare) else bare


def _is_name(part: str) -> bool:
    return is_word(part) and part.casefold() not in _FUNCTIONS | _JOINING


def _has_no_case(part: str) -> bool:
    """Return whether letters mean the same in either case though they are no word: an option, or a very short word."""
    low = part.casefold()
    return low in _CHOICES or low in _SHORT or not low.isascii() or not any(map(str.isalpha, low))


def unwrapped_words(text: str) -> str:
    """The text without `\\text{...}` around its words."""
    return " ".join(TEXT.sub(r" \1 ", text).split())


def is_words(text: str) -> bool:
    """Return whether a text has words and no formula: letters that stand for a word, not for a product of variables.

    The time of a day counts as a word, and so does a date.
    """
    text = _DATE.sub("date", CLOCK.sub("noon", unwrapped_words(text)))
    parts = re.split(r"[\s'’,.-]+", text)
    letters = all(part.isalpha() or not part for part in parts)
    return letters and any(is_word(part) for part in parts)


def has_numbers_and_names(text: str) -> bool:
    """Return whether a text is of words and numbers, such as Team 2 or Class B2; numbers with a unit are, too."""
    parts = [part for part in re.split(r"[\s'’,.-]+", unwrapped_words(text)) if part]
    return all(map(str.isalnum, parts)) and any(map(_is_name, parts))


def letters(formula: str) -> set[str]:
    """Return the letters in a formula that are neither in a command nor in a word.

    >>> sorted(letters(r"\\frac{X}{x}\\text{ cm}"))
    ['X', 'x']
    """
    return set(filter(str.isalpha, _COMMANDS.sub(" ", formula)))


def is_word(text: str) -> bool:
    """Return whether letters are a word: three or more with a vowel, and not the first letters of an alphabet.

    >>> is_word("north"), is_word("xyz"), is_word("abc"), is_word("mn")
    (True, False, False, False)
    """
    low = text.casefold()
    alphabetical = "".join(sorted(low)) in "abcdefghijklmnopqrstuvwxyz"
    return len(low) > 2 and low.isalpha() and not alphabetical and (not low.isascii() or bool(set(low) & set("aeiouy")))


__all__ = [
    "CLOCK",
    "TEXT",
    "clocks",
    "dates",
    "has_numbers_and_names",
    "is_word",
    "is_words",
    "letters",
    "unwrapped_words",
    "words",
]
