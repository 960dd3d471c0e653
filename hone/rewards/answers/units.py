"""Numbers with units: 5 m/s is 5 meters per second, and 5 million is 5,000,000. No unit becomes another one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from hone.rewards.answers.numerals import SCALES
from hone.rewards.answers.words import TEXT, is_word, unwrapped_words

NUMBER = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?"
_ONE_NUMBER = re.compile(rf"([-+]?)\s{{0,9}}(?=[.\d])({NUMBER})\.?")
_WITH_UNIT = re.compile(rf"([-+]?\s{{0,9}}(?=[.\d]){NUMBER})(\s{{0,9}})([A-Za-z][^+=<>|,;()&_]{{0,80}})")
_SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad(?![a-z])|\\cdot(?![a-z])|\s+")
_BRACES = re.compile(r"\^\s?\{\s?(-?[1-9])\s?\}")
_WORD = r"(?:\\(?:text|mathrm)\s?)?\{\s?[A-Za-z]{1,20}\s?\}(?:\^\s?\{?[1-9]\}?)?"
_FRACTION = re.compile(rf"\\[dt]?frac\s?\{{\s?({_WORD})\s?\}}\s?\{{\s?({_WORD})\s?\}}")
_AT_THE_END = re.compile(r"(?<=[\s}])((?:square |cubic |sq )?[A-Za-z]{2,12})(?=(?:\s?\^\s?\{?[23]\}?)?$)")
_TOKEN = re.compile(r"\s*(?:([A-Za-z][A-Za-z'.-]{0,39})|(/))(?:\s?\^\s?(-?[1-9])|([23]))?(?![\d^])")
_NO_UNITS = frozenset(("and", "or", "to", "plus", "minus", "times", "by"))
_POWER_OF_UNIT = re.compile(r"\s?(?:\^\s?\{?([23])\}?)?\s?")
_POWERS = {"square": 2, "cubic": 3, "squared": 2, "cubed": 3}
_SAME = {  # other names of a unit; those with "s" at the end are found without it
    "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm",
    "kilometer": "km", "kilometre": "km", "gram": "g", "kilogram": "kg", "milligram": "mg", "liter": "l", "litre": "l",
    "milliliter": "ml", "millilitre": "ml", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "inch": "in", "inche": "in", "feet": "ft", "foot": "ft", "mile": "mi", "pound": "lb", "lbs": "lb", "ounce": "oz",
    "yard": "yd", "sq": "square", "cu": "cubic", "dollar": "", "usd": "", "unit": "", "cent": "cent", "days": "day",
    "week": "week", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mph": "mi/h", "celsius": "c", "fahrenheit": "f",
    "percent": "percent", "deg": "degree",
}  # fmt: skip
_SHORT = frozenset(_SAME.values()) | {"mph", "kmh", "kph", "kmph", "km/h", "m/s", "ha", "kw", "hz", "pm", "am"}
_SHORT -= {"", "c", "f", "square", "cubic"}
_OF_DEGREES = frozenset(("c", "f"))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit, "" for none: 5 apples are Quantity(5, "apple").

    `scale` is the number that a word for one stands for, 10**6 for a million; 0 where the text has no such word.
    `may_be_product`: the unit is a letter right after the number, as in 6s, which may as well be a variable.
    """

    value: Fraction
    unit: str
    scale: int = 0
    may_be_product: bool = False

    def values(self, other: Quantity) -> list[tuple[Fraction, Fraction]]:
        """The pairs of numbers that are equal if the quantities are; none if their units differ.

        5 million are 5,000,000, and 5 where millions are asked for.
        """
        if self.unit and other.unit and self.unit != other.unit:
            return []
        if self.scale and other.scale:
            return [(self._scaled(), other._scaled())]
        return [(one, two) for one in {self.value, self._scaled()} for two in {other.value, other._scaled()}]

    def _scaled(self) -> Fraction:
        return self.value * (self.scale or 1)


def number(text: str) -> Fraction | None:
    """The number that a plain text is, exactly; None if it is anything else.

    >>> number("-1,000.5"), number("1e-05"), number("3/4")
    (Fraction(-2001, 2), Fraction(1, 100000), None)
    """
    found = _ONE_NUMBER.fullmatch(text.strip())
    if found is None or not any(character.isdigit() for character in found[2]):
        return None
    value = Fraction(Decimal(found[2].replace(",", "")))
    return -value if found[1] == "-" else value


def quantity(text: str) -> Quantity | None:
    """A number with a unit in words; None for anything else, also for a product such as 2x.

    >>> quantity(r"10\\text{ cm}^2").unit, quantity("5 apples").unit, quantity("3 meters per second").unit
    ('cm2', 'apple', 'm s-1')
    >>> quantity("2x")
    """
    value = number(text)
    if value is not None:
        return Quantity(value, "")
    written = bool(TEXT.search(text))
    text = _FRACTION.sub(r"\1/\2", text)
    text = _BRACES.sub(r"^\1", _SPACES.sub(" ", text.replace(r"^\circ", " degrees ")))
    text = unwrapped_words(text)
    found = _WITH_UNIT.fullmatch(text)
    if found is None or (value := number(found[1])) is None:
        return None
    read = _units(found[3])
    if read is None:
        return None
    words, powers, scale = read
    short = _SHORT | _OF_DEGREES if "degree" in powers else _SHORT
    if not written and not all(is_word(word) or word.casefold() in short for word in words):
        return None
    unit = " ".join(name + (str(power) if power != 1 else "") for name, power in sorted(powers.items()))
    is_letter = not written and not found[2] and any(len(word) == 1 for word in words)
    return Quantity(value, unit, scale, is_letter)


def with_unit_in_text(text: str) -> str:
    """A formula with `\\text` around the unit of measurement that ends it.

    >>> with_unit_in_text(r"100\\pi cm^2"), with_unit_in_text(r"100\\pi xy"), with_unit_in_text("5 cm")
    ('100\\\\pi \\\\text{cm}^2', '100\\\\pi xy', '5 cm')
    """
    found = _AT_THE_END.search(text, max(len(text) - 40, 0)) if "\\" in text else None
    if found is None or _name(found[1].split()[-1]) not in _SHORT - {"in"} | {"", "degree"}:
        return text
    return text[: found.start()] + f"\\text{{{found[1]}}}" + text[found.end() :]


def unit_at_the_end(text: str) -> str:
    """The unit of measurement in `\\text{...}` at the end of a formula, "" for none.

    >>> unit_at_the_end(r"2\\sqrt{3}\\text{ cm}^2"), unit_at_the_end(r"2\\text{ apples}")
    ('cm2', '')
    """
    opened = text.rfind("\\")
    found = TEXT.match(text, opened) if opened > 0 else None
    rest = _POWER_OF_UNIT.fullmatch(text[found.end() :]) if found else None
    words = [_name(word) for word in found[1].split()] if found and rest else []
    if len(words) == 2 and words[0] in _POWERS and words[1]:
        return f"{words[1]}{_POWERS[words[0]]}" if words[1] in _SHORT else ""
    return words[0] + (rest[1] or "") if len(words) == 1 and rest and words[0] in _SHORT else ""


def _units(text: str) -> tuple[list[str], dict[str, int], int] | None:
    """The words of a unit, the power of each part of it, and the number that a word such as million stands for."""
    text = text.strip(" .-")
    words: list[str] = []
    powers: dict[str, int] = {}
    place, sign, following, scale = 0, 1, 1, 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or (found[1] or "").casefold() in _NO_UNITS:
            return None
        place, exponent = found.end(), int(found[3] or found[4] or 1)
        name = _name(found[1]) if found[1] else ""
        if found[2] or name == "per":
            sign = -1
        elif name in ("square", "cubic"):
            following = _POWERS[name]
            words.append(found[1])
        elif name in ("squared", "cubed") and powers:
            last = list(powers)[-1]
            powers[last] *= _POWERS[name]
        elif name in SCALES and not powers and not scale:
            scale = SCALES[name]
            words.append(found[1])
        else:
            words.append(found[1])
            for part, power in zip(name.split("/"), (1, -1), strict=False):
                if part:
                    powers[part] = powers.get(part, 0) + sign * power * following * exponent
            following = 1
    return words, powers, scale


def _name(word: str) -> str:
    word = word.casefold().strip(".'-")
    single = word.removesuffix("s") if len(word) > 2 else word
    return _SAME.get(word, _SAME.get(single, single))


__all__ = ["NUMBER", "Quantity", "number", "quantity", "unit_at_the_end", "with_unit_in_text"]
