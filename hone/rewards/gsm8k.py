"""GSM8K: the final number of a solution, compared exactly."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from hone.rewards.extraction import MARKER, last_number, marked_number, marks_several, only_number, spelled


def gsm8k(
    response: str, ground_truth: Any, row: Mapping[str, Any], extraction: Literal["strict", "flexible"] = "flexible"
) -> float:
    """1.0 if the response ends with the right number, else 0.0.

    `strict` reads only the number after the last '####'; `flexible` falls back to the last number in the text. A marked
    line of several numbers, such as '#### 5 or 6', is no answer. Numbers are compared exactly: 1,000 equals $1000.00.
    The ground truth is a number with at most a unit, or a solution that ends with '#### number', as in the data set
    (https://github.com/openai/grade-school-math).

    >>> gsm8k("It is 72 clips.", "48+24=72\\n#### 72", {}), gsm8k("It is 72 clips.", 72, {}, extraction="strict")
    (1.0, 0.0)
    """
    expected = _expected(ground_truth)
    if marks_several(response):
        return 0.0
    found = marked_number(response)
    if found is None and extraction == "flexible":
        found = last_number(response)
    return float(found == expected)


def _expected(ground_truth: Any) -> Fraction:
    text = spelled(ground_truth)
    number = only_number(text.rpartition(MARKER)[2])
    if number is None or isinstance(ground_truth, bool):
        raise ValueError(
            f"the ground truth should be one number, with at most a unit, or a solution with '#### number', found "
            f"{text[-80:]!r}; the reward math compares anything else"
        )
    return number
