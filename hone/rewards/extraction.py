"""Find the number that is the answer in a response, and spell the numbers of a data set."""

from __future__ import annotations

import math
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any

MARKER = "####"
VULGAR = {  # ½ -> ("1", "2")
    chr(code): tuple(unicodedata.normalize("NFKC", chr(code)).split("⁄"))
    for code in (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189)
}
_GAP = r"(?:\{,\}|,\\!\s?|\{?\\(?:[!,;: ]|thinspace\b)\}?\s?|[~ \u00a0\u2002-\u200a\u202f\u205f])"
_GAPS = re.compile(_GAP)
_WIDE = frozenset({" ", "~", "\\ "})  # of the gaps, those that may also stand between two numbers
_GROUPS = re.compile(rf"(?<![0-9])[0-9]++(?:{_GAP}[0-9]++)+")  # no "++": Python before 3.11.5 matches it wrongly
_UNDER = re.compile(r"\s?/\s?([0-9]{1,30})")
# A run of digits, commas and points, with its sign: a '-' after a word, a digit or a closing bracket is a minus.
_RUN = re.compile(
    r"(?P<sign>(?<![\w)\]}.%])[-+])?(?P<run>(?:(?<![.\w])\.)?(?<![0-9])[0-9][0-9.,]*)(?:/(?P<under>[0-9]{1,30})(?![0-9]))?"
)
_NUMBER = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_LIST = re.compile(r"[0-9]{1,20}(?:,(?:0|[1-9][0-9]?))+")  # members of three digits would be groups of thousands
_GOES_ON = re.compile(r"\s*[-+*/^:=]\s*[0-9]")  # an expression that begins with a number: "3/4", "5 + 3 = 8"
_LONGEST = 5000  # characters of a number; a longer one is none
_UNIT = re.compile(r"[\s%°$€£¥₹.,'\"()/-]*(?:[^\W\d_][\s%°.,'\"()/-]*)*")
_JOINING = re.compile(r"\b(?:and|or|to|plus|minus|times|by)\b", re.IGNORECASE)
_TEX = str.maketrans({"−": "-", "$": None, "\\": None})
_TIME = re.compile(r"(?<![0-9:])[0-9]++(?:\s?:\s?[0-9]++)+")
_DATE = re.compile(r"(?<![0-9/])[0-9]++(?:/[0-9]++){2,}")
_MIXED = re.compile(
    r"(?<![\w./,])([0-9]{1,30})(?: ([0-9]{1,30})/([0-9]{1,30})(?![\w/])|\s?([" + "".join(VULGAR) + "]))"
)
_SCIENTIFIC = re.compile(
    r"(?<![\w.,])([0-9]{1,400}(?:\.[0-9]{1,400})?)"
    r"(?:[eE]|\s?(?:\*|×|x|·|times|cdot)\s?10\s?(?:\^|\*\*)\s?\{?)([-+]?[0-9]{1,3})(?!\w)\}?"
)
_POWER = re.compile(r"(?<![\w.,])[0-9]++(?:[.,][0-9]++)*(?:\s?(?:\^|\*\*)\s?\{?-?[0-9]++\}?|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]++)")


def spelled(value: Any) -> str:
    """A ground truth as text. A number of JSON or Parquet is spelled exactly and without an exponent.

    Raises ValueError for a float that is no number.

    >>> spelled(1e-05), spelled(1.5e16), spelled(7.0), spelled("7.0"), spelled(9007199254740993)
    ('0.00001', '15000000000000000', '7', '7.0', '9007199254740993')
    """
    if not isinstance(value, float | Decimal):
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"the ground truth should be a number, found {value}")
    text = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def in_ascii(text: str) -> str:
    """The text with ASCII digits and signs, in place of full-width ones and of digits of other scripts.

    >>> in_ascii("４２／３"), in_ascii("٧٢"), in_ascii("5²")
    ('42/3', '72', '5²')
    """
    return text if text.isascii() else "".join(map(_in_ascii, text))


def _in_ascii(character: str) -> str:
    if "！" <= character <= "～":  # of full width
        return chr(ord(character) - 0xFEE0)
    return str(unicodedata.decimal(character)) if character.isdecimal() else " " if character == "　" else character


def joined(text: str, spaces: bool = True) -> str:
    """The text without what stands between groups of three digits of one number: a space, or one of TeX's.

    `spaces`: also a plain one, which in running text may stand between two numbers.

    >>> joined(r"1 000"), joined(r"12\\,345.6"), joined("1{,}000"), joined("1 2"), joined("1 0000"), joined("2 100/201")
    ('1000', '12345.6', '1000', '1 2', '1 0000', '2 100/201')
    """
    return _GROUPS.sub(lambda found: _joined(found) if spaces or " " not in found[0] else found[0], text)


def _joined(found: re.Match[str]) -> str:
    text, (first, *rest) = found.string, _GAPS.split(found[0])
    before = text[max(found.start() - 2, 0) : found.start()]
    gaps = _GAPS.findall(found[0])
    is_spaced = " " in gaps
    if before[-1:] in (".", ",") and before[:1].isdigit():  # digits after the point, which TeX's spaces may group
        fits = len(first) == 3 and not is_spaced and before[1] == "."
    else:
        fits = len(first) < 4 and first[0] != "0" and before[-1:] not in ("^", "_", "/", ":")
    if not fits or any(len(group) != 3 for group in rest):
        return found[0]
    under = _UNDER.match(text, found.end())
    is_mixed = under and len(rest) == 1 and rest[0][0] != "0" and int(rest[0]) < int(under[1])  # 2 100/201
    opening = text[max(found.start() - 4, 0) : found.start()].rstrip(" ~")
    closing = text[found.end() : found.end() + 4].lstrip(" ~")
    is_enclosed = (opening[-1:] + closing[:1] in ("[]", "()")) or (opening[-2:] + closing[:2] == "\\{\\}")
    is_list = is_enclosed and not _WIDE.isdisjoint(gaps)  # a vector, a cycle, or a set
    return found[0] if is_mixed or is_list else first + "".join(rest)


def only_number(text: str) -> Fraction | None:
    """The number that is all of a text but for a unit, as a ground truth has it; None if there is more.

    >>> only_number("$1,012.50 in all"), only_number("1e-05"), only_number("5 or 6"), only_number("x = 5")
    (Fraction(2025, 2), Fraction(1, 100000), None, None)
    """
    line = re.sub(r"^([-+]?)\s?[€£¥₹]\s?", r"\1", _plain(text).strip())
    match = _RUN.match(line)
    number = _read(match) if match and not match["under"] else None
    if match is None or number is None:
        return None
    rest = line[match.end() :] if match["run"][-1] not in ".," else line[match.end() :].lstrip(".,")
    return None if _JOINING.search(rest) or not _UNIT.fullmatch(rest) else number


def marked_number(text: str) -> Fraction | None:
    """The number after the last '####' that is followed by a number on its line, as in GSM8K's solutions.

    >>> marked_number("18 - 6 = 12 dollars\\n#### $1,012.50 in all"), marked_number("the answer is 12")
    (Fraction(2025, 2), None)
    """
    for piece in reversed(text.split(MARKER)[1:]):
        line = _plain(piece.split("\n", 1)[0]).lstrip()
        match = _RUN.match(line)
        if match and not match["under"] and not _GOES_ON.match(line, match.end()):
            number = _read(match)
            if number is not None:
                return number
    return None


def marks_several(text: str) -> bool:
    """Return whether the last line with '####' and a number names another number: it is no answer.

    >>> marks_several("#### 5 apples and 3 pears"), marks_several("#### 5, which is right"), marks_several("5 and 3")
    (True, False, False)
    """
    for piece in reversed(text.split(MARKER)[1:]):
        line = _plain(piece.split("\n", 1)[0]).lstrip()
        if match := _RUN.match(line):
            rest = line[match.end() :]
            return any(character.isdigit() for character in rest) and _JOINING.search(rest) is not None
    return False


def last_number(text: str) -> Fraction | None:
    """The last number in the text, whatever surrounds it; in a list without spaces, such as 1,2,3, its last member.

    A fraction is one number. Times, dates and powers are none, nor is a number with commas in wrong places: None then.

    >>> last_number("from -3 to 1,000, so 4."), last_number("1,2,3"), last_number("3½ at 12:30"), last_number("none")
    (Fraction(4, 1), Fraction(3, 1), Fraction(7, 2), None)
    """
    for match in reversed(list(_RUN.finditer(_plain(text, spaces=False)))):
        number = _read(match)
        if number is None and not match["under"]:
            run = match["run"].rstrip(".,")
            if _LIST.fullmatch(run):
                return Fraction(int(run.rpartition(",")[2]))
            if "," in run:
                return None  # groups of thousands that are none, such as 1,111,1
        if number is not None:
            return number
    return None


def _plain(text: str, spaces: bool = True) -> str:
    """The text without dollar signs and backslashes, with numbers spelled in digits, and without times and powers."""
    text = joined(in_ascii(text), spaces).replace("{,}", ",").translate(_TEX)
    text = _DATE.sub("(date)", _TIME.sub("(time)", text))
    text = _MIXED.sub(_improper, text)
    text = re.sub(f"[{''.join(VULGAR)}]", lambda found: "/".join(VULGAR[found[0]]), text)
    text = _SCIENTIFIC.sub(lambda found: format(Decimal(f"{found[1]}e{found[2]}"), "f"), text)
    return _POWER.sub("(power)", text)


def _improper(found: re.Match[str]) -> str:
    """3 1/2 or 3½ as 7/2."""
    over, under = (int(one) for one in (VULGAR[found[4]] if found[4] else (found[2], found[3])))
    return f"{int(found[1]) * under + over}/{under}"


def _read(match: re.Match[str]) -> Fraction | None:
    run, under = match["run"].rstrip(".,"), match["under"]
    if (
        len(run) > _LONGEST
        or not _NUMBER.fullmatch(run)
        or (under is not None and (run != match["run"] or not int(under)))
    ):
        return None
    number = Fraction(Decimal(run.replace(",", ""))) / (int(under) if under else 1)
    return -number if match["sign"] == "-" else number
