"""JSON that others wrote (a model, a client, an unproven peer): nesting is limited before it is parsed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

DEEPEST = 64  # levels of arrays and objects
ON_THE_LOOP = 1 << 16  # bytes; a longer text is parsed in a thread
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


async def parse_json_apart(text: str | bytes) -> Any:
    """The same, in a thread if the text is long, so that the event loop goes on."""
    return parse_json(text) if len(text) <= ON_THE_LOOP else await asyncio.to_thread(parse_json, text)


__all__ = ["DEEPEST", "parse_json", "parse_json_apart"]
