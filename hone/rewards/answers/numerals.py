"""Numbers in words: twenty-five, 5 million, minus 5."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

_ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {word: value for value, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALED = re.compile(rf"(?<![\w.,])(\d[\d,]{{0,40}}(?:\.\d{{1,40}})?)\s({'|'.join(SCALES)})\b", re.IGNORECASE)
_DOLLARS_AND_CENTS = re.compile(r"(?<![\w.,])(\d[\d,]{0,20})\sdollars?(?:,?\sand|,)\s(\d{1,2})\scents?\b")
_WORD = re.compile(r"[A-Za-z]+")
_MOST_WORDS = 12
_NUMBER_NEXT = r"(?=\\?\$?[\d.]|\\frac|\\sqrt)"
_SIGN = re.compile(
    rf"(?:^|(?<=\bis\s)|(?<=\bbe\s)|(?<=[=:$({{]\s)|(?<=[=:$({{]))(?:minus|negative)\s{{1,3}}{_NUMBER_NEXT}"
    rf"|\\text\s?\{{\s?(?:minus|negative)\s?\}}\s?{_NUMBER_NEXT}",
    re.IGNORECASE,
)


def signed(text: str) -> str:
    """A text with `-` for "minus" and "negative" before a number, unless it is a difference.

    >>> signed("It is minus 5."), signed("10 minus 5")
    ('It is -5.', '10 minus 5')
    """
    return _SIGN.sub("-", text)


def scaled(text: str) -> str:
    """A text with digits for numbers that a word multiplies.

    >>> scaled("It is 2.5 million."), scaled("a million")
    ('It is 2500000.', 'a million')
    """
    return _SCALED.sub(_scaled, text)


def dollars_and_cents(text: str) -> str:
    """A text with one amount for dollars and cents.

    >>> dollars_and_cents("It is 12 dollars and 5 cents.")
    'It is 12.05 dollars.'
    """
    return _DOLLARS_AND_CENTS.sub(lambda found: f"{found[1]}.{int(found[2]):02} dollars", text)


def _scaled(found: re.Match[str]) -> str:
    value = Fraction(Decimal(found[1].replace(",", ""))) * SCALES[found[2].lower()]
    return str(value.numerator) if value.denominator == 1 else found[0]


def in_digits(text: str) -> str:
    """A text that begins with a number in words, with digits for them; other texts as they are.

    >>> in_digits("twenty-five apples"), in_digits("one hundred and five"), in_digits("a hundred"), in_digits("one-way")
    ('25 apples', '105', 'a hundred', 'one-way')
    """
    total = current = 0
    end = read = 0
    for found in _WORD.finditer(text):
        word, gap = found[0].lower(), text[end : found.start()]
        if gap not in ("", " ", "-") or read == _MOST_WORDS:
            break
        if word == "and" and read and current % 100 == 0 and _follows(text, found.end()):
            end = found.end()
            continue
        if word in _VALUES and (not read or _fits(current, _VALUES[word])):
            current += _VALUES[word]
        elif word in ("hundred", "thousand", "million") and read and current:
            current *= SCALES[word]
            if word != "hundred":
                total, current = total + current, 0
        else:
            break
        end, read = found.end(), read + 1
    if not read or text[end : end + 1] == "-":
        return text
    return f"{total + current}{text[end:]}"


def _follows(text: str, place: int) -> bool:
    following = _WORD.match(text, place + 1)
    return following is not None and following[0].lower() in _VALUES


def _fits(current: int, value: int) -> bool:
    """Return whether a value may follow in the same number: a digit after tens, anything below a hundred after one."""
    return current % 100 == 0 or (value < 10 and current % 10 == 0 and current % 100 >= 20 and value > 0)


__all__ = ["SCALES", "dollars_and_cents", "in_digits", "scaled", "signed"]
