"""Part marks for sorting: how much of the list is already right. The verifier says only all or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def in_place(response: str, ground_truth: str, row: Mapping[str, Any]) -> float:
    """The share of positions that hold the right number; 0 for an answer that is not a list of the right length."""
    try:
        answer = json.loads(response)
    except json.JSONDecodeError:
        return 0.0
    right = json.loads(ground_truth)
    if not isinstance(answer, list) or len(answer) != len(right):
        return 0.0
    return sum(a == b for a, b in zip(answer, right, strict=True)) / len(right)
