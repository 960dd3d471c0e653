"""The reward of both sides: cheap, and different for different answers, so that no group is without a gradient."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any


def score(response: str, ground_truth: Any = None, row: Mapping[str, Any] | None = None) -> float:
    """A number in [0, 1) that depends on the answer alone."""
    return zlib.crc32(response.strip().encode()) % 1000 / 1000
