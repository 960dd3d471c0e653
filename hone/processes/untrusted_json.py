"""JSON that others wrote (a model, a client, an unproven peer): nesting is limited before it is parsed."""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 64  # levels of arrays and objects
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)  # a string that does not end is one token too


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError for text that is not JSON, or nested deeper than DEEPEST."""
    if isinstance(text, bytes):
        text = text.decode()
    depth = 0
    for found in _TOKENS.finditer(text):
        first = found[0][0]
        if first in "[{":
            depth += 1
        elif first in "]}":
            depth -= 1
        if depth > DEEPEST:
            raise ValueError(f"the JSON text is nested deeper than {DEEPEST} levels")
    return json.loads(text)


__all__ = ["DEEPEST", "parse_json"]
