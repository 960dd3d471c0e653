"""Countdown's verifier as right or wrong: it gives part marks as well, which would blur the figure that is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.rewards.reasoning_gym import reasoning_gym


def solved(response: str, ground_truth: Any, row: Mapping[str, Any]) -> float:
    """1.0 if the expression uses each number once and gives the target, else 0.0."""
    return float(reasoning_gym(response, ground_truth, row) == 1.0)
