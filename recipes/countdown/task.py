"""Countdown's verifier as right or wrong, because the verifier also gives partial credit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.rewards.reasoning_gym import reasoning_gym


def solved(response: str, ground_truth: Any, row: Mapping[str, Any]) -> float:
    """Return 1.0 if the expression uses each number once and equals the target, else 0.0."""
    return float(reasoning_gym(response, row) == 1.0)
