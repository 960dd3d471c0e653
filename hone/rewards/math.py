"""Mathematical equivalence, checked with the math-verify package (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

# math-verify's own timeouts would score a late comparison as wrong, so they are off (and the warning about that is
# silenced). The deadline of the reward process replaces them.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)

# Otherwise an answer of more than 4,300 digits would be a failure of the reward and no wrong answer.
sys.set_int_max_str_digits(0)

DELIMITERS = ("$", "\\(", "\\[", "\\boxed", "\\begin")


def math(response: str, ground_truth: Any, row: Mapping[str, Any]) -> float:
    """1.0 if the response's final answer equals the ground truth mathematically, else 0.0.

    The answer is what math-verify extracts: the last boxed expression, else the last formula or number.
    The ground truth is a number, or text: LaTeX with or without `$` or `\\boxed`, or a plain expression.
    """
    return float(verify(_expected(str(ground_truth)), _parse(response), timeout_seconds=None, raise_on_error=True))


@functools.lru_cache(maxsize=1024)
def _expected(text: str) -> list[Any]:
    marked = text if any(delimiter in text for delimiter in DELIMITERS) else f"${text}$"
    parsed = _parse(marked)
    if not parsed:
        raise ValueError(f"the ground truth should contain a mathematical expression, found {text[:80]!r}")
    return parsed


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return parsed
