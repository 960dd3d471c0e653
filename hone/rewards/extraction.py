"""Find the number that is the answer in a response."""

from __future__ import annotations

import re
from decimal import Decimal

MARKER = "####"
# A run of digits, commas and points, with its sign: a '-' after a word, a digit or a closing bracket is a minus.
_RUN = re.compile(r"(?P<sign>(?<![\w)\]}.%])[-+])?(?P<run>(?:(?<![.\w])\.)?(?<![0-9])[0-9][0-9.,]*)")
_NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_GOES_ON = re.compile(r"\s*[-+*/^:=]\s*[0-9]")  # an expression that begins with a number: "3/4", "5 + 3 = 8"
_TEX = str.maketrans({"−": "-", "$": None, "\\": None})


def marked_number(text: str) -> Decimal | None:
    """The number after the last '####' that is followed by a number on its line, as in GSM8K's solutions.

    >>> marked_number("18 - 6 = 12 dollars\\n#### $1,012.50 in all"), marked_number("the answer is 12")
    (Decimal('1012.50'), None)
    """
    for piece in reversed(text.split(MARKER)[1:]):
        line = _plain(piece.split("\n", 1)[0]).lstrip()
        match = _RUN.match(line)
        if match and not _GOES_ON.match(line, match.end()) and (number := _read(match)) is not None:
            return number
    return None


def last_number(text: str) -> Decimal | None:
    """The last number in the text, whatever surrounds it; in a list without spaces, its last member.

    >>> last_number("from -3 to 1,000, so 4."), last_number("1,2,3"), last_number("none")
    (Decimal('4'), Decimal('3'), None)
    """
    for match in reversed(list(_RUN.finditer(_plain(text)))):
        number = _read(match)
        if number is None and _NUMBER.fullmatch(member := match["run"].rstrip(".,").rpartition(",")[2]):
            number = Decimal(member)
        if number is not None:
            return number
    return None


def _plain(text: str) -> str:
    """Remove dollar signs and backslashes, and replace TeX's thousands comma with a plain one."""
    return text.replace("{,}", ",").translate(_TEX)


def _read(match: re.Match[str]) -> Decimal | None:
    run = match["run"].rstrip(".,")
    if not _NUMBER.fullmatch(run):
        return None
    number = Decimal(run.replace(",", ""))
    return number.copy_negate() if match["sign"] == "-" else number  # `-number` would round it to 28 digits
