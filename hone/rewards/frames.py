"""The wire between hone and its reward processes: a 4-byte big-endian length, then that much JSON.

hone -> worker   {"components": {name: {"reward", "options", "timeout_s"}}}            once
worker -> hone   {"ready": true, "concurrent": [name, ...]}   or   {"error": text}     once
hone -> worker   {"component": name, "items": [[response, ground_truth, row], ...]}    when the last one is answered
worker -> hone   {"item": i, "value", "parts", "seconds"}  or  {"item": i, "error", "late"}    as each is done
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
import struct
from collections.abc import Mapping
from typing import Any

LENGTH = struct.Struct(">I")
LONGEST = 1 << 30  # bytes: a longer frame is a stream out of step, not a message


class BrokenFrame(ValueError):
    """The stream does not hold frames: something else wrote to it."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as a frame."""
    return frame(json.dumps(message, default=as_text))


def encode_value(value: Any) -> str:
    """One value as JSON text. Dates and decimals become ISO text, tuples lists.

    Raises TypeError for what JSON cannot carry (bytes, sets, objects).
    """
    return json.dumps(value, default=as_text)


def frame(text: str) -> bytes:
    body = text.encode("utf-8")
    return LENGTH.pack(len(body)) + body


def as_text(value: Any) -> str:
    """Dates and decimals as text; raises TypeError for anything else that JSON cannot carry."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a reward process")


class FrameBuffer:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add what was read; the messages that are now complete. Raises BrokenFrame if it is not the protocol."""
        self._bytes += data
        messages = []
        start = 0
        while len(self._bytes) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, start)
            if length > LONGEST:
                raise BrokenFrame(f"a frame of {length} bytes was announced")
            end = start + LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(_decode(bytes(self._bytes[start + LENGTH.size : end])))
            start = end
        del self._bytes[:start]
        return messages


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise BrokenFrame(f"a frame is not JSON: {body[:40]!r}") from error
    if not isinstance(message, dict):
        raise BrokenFrame(f"a frame is not an object: {body[:40]!r}")
    return message


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a blocking descriptor until everything is out."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
