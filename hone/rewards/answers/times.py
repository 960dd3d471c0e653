"""Times of a day: 9:00 AM is 9:00, and 9:00 PM is 21:00."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TIME = re.compile(
    r"(?<![\d:.,])(\d{1,2})(?:(?::(\d{2}))(?::(\d{2}))?\s?(?:([ap])\.?\s?m\b\.?|o['’]clock)?"
    r"|\s?(?:([ap])\.?\s?m\b\.?|o['’]clock))(?![\d:])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Time:
    """A time of a day; `half` is "a" or "p" for AM and PM, "" for none."""

    hour: int
    minute: int
    second: int
    half: str

    def equals(self, other: Time) -> bool:
        """Return whether both may be the same time: one that does not say AM or PM may be either."""
        if (self.minute, self.second) != (other.minute, other.second):
            return False
        if self.half and other.half:
            return (self._of_24(), self.half) == (other._of_24(), other.half)
        if self.half or other.half:
            named, bare = (self, other) if self.half else (other, self)
            return bare.hour in (named.hour, named._of_24())
        return self.hour == other.hour

    def _of_24(self) -> int:
        return self.hour if self.hour > 12 else self.hour % 12 + (12 if self.half == "p" else 0)


def times(text: str) -> list[Time]:
    """The times of a day in a text, in order.

    >>> times("from 9 a.m. to 12:30")
    [Time(hour=9, minute=0, second=0, half='a'), Time(hour=12, minute=30, second=0, half='')]
    """
    return [_time(found) for found in _TIME.finditer(text)]


def time_of_day(text: str) -> Time | None:
    """The time that a text is; None for anything else.

    >>> time_of_day("9:05 PM"), time_of_day("at 9:05")
    (Time(hour=9, minute=5, second=0, half='p'), None)
    """
    found = _TIME.fullmatch(text.strip())
    return None if found is None else _time(found)


def _time(found: re.Match[str]) -> Time:
    hour, minute, second, *half = found.groups()
    return Time(int(hour), int(minute or 0), int(second or 0), (half[0] or half[1] or "").lower())


__all__ = ["Time", "time_of_day", "times"]
