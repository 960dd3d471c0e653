"""The messages between hone and its child processes: a header of fixed size, then JSON.

    length 4 bytes | kind 1 | process id 4 | batch 8 | JSON object        (big-endian; length counts the JSON only)

The process id is the sender's at the time of sending, so a frame of a forked copy of a child is recognised. `batch` is
the number of the request, so a late reply to an earlier request is recognised. A reader checks size and depth before it
parses.
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
import re
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

HEADER = struct.Struct(">IBIQ")
MOST_BYTES = 1 << 30  # of one frame
MOST_DEPTH = 200  # nested lists and objects in one value
MESSAGE_DEPTH = 8  # levels that a message adds around its values
# A string that does not end is one too, so this never goes back: linear in the length, and in Python 3.10's syntax.
STRINGS = re.compile(rb'"(?:[^"\\]+|\\.)*"?', re.DOTALL)


class BrokenFrame(ValueError):
    """The stream does not hold frames, or one that is too long or too deep."""


class Kind(IntEnum):
    """Kind of a frame."""

    HELLO = 1  # the first frame in either direction: what to load, and whether that worked
    BEAT = 2  # a child is alive
    REQUEST = 3
    REPLY = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    process: int  # the sender's process id
    batch: int  # the number of the request; 0 for HELLO and BEAT
    body: dict[str, Any]


def encode(kind: Kind, batch: int, body: Mapping[str, Any] | str) -> bytes:
    """A frame of this process; `body` may be JSON text already. Raises BrokenFrame if it is too long."""
    data = (body if isinstance(body, str) else encode_value(body)).encode("utf-8")
    if len(data) > MOST_BYTES:
        raise BrokenFrame(f"a message of {len(data)} bytes is longer than {MOST_BYTES}")
    return HEADER.pack(len(data), kind, os.getpid(), batch) + data


def encode_value(value: Any) -> str:
    """One value as JSON text. Dates, durations, decimals and UUIDs become text, tuples become lists.

    Raises TypeError for what JSON cannot carry (bytes, sets, objects) and for more than `MOST_DEPTH` levels.
    """
    try:
        text = json.dumps(value, default=as_text)
    except RecursionError as error:
        raise TypeError(f"lists and objects are nested more than {MOST_DEPTH} levels deep") from error
    if _deepest(text.encode("utf-8")) > MOST_DEPTH:
        raise TypeError(f"lists and objects are nested more than {MOST_DEPTH} levels deep")
    return text


def as_text(value: Any) -> str:
    """Dates, durations, decimals and UUIDs as text. Raises TypeError for anything else that JSON cannot carry."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to another process")


class FrameReader:
    """Bytes in, whole frames out."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add what was read; yields the frames that are now complete. Raises BrokenFrame when it comes to one."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            length, kind, process, batch = HEADER.unpack_from(self._bytes)
            if length > self._most_bytes or kind not in set(Kind):
                raise BrokenFrame(f"a frame of kind {kind} and {length} bytes; at most {self._most_bytes} are taken")
            end = HEADER.size + length
            if len(self._bytes) < end:
                return
            frame = Frame(Kind(kind), process, batch, _decode(bytes(self._bytes[HEADER.size : end])))
            del self._bytes[:end]
            yield frame


def _decode(body: bytes) -> dict[str, Any]:
    if _deepest(body) > MOST_DEPTH + MESSAGE_DEPTH:
        raise BrokenFrame(f"a frame is nested more than {MOST_DEPTH} levels deep")
    try:
        message = json.loads(body)
    except ValueError as error:
        raise BrokenFrame(f"a frame is not JSON: {body[:40]!r}") from error
    if not isinstance(message, dict):
        raise BrokenFrame(f"a frame is not an object: {body[:40]!r}")
    return message


def _deepest(text: bytes) -> int:
    """Return the nesting depth of some JSON, or an upper bound if it has few brackets."""
    if (few := text.count(b"[") + text.count(b"{")) <= MOST_DEPTH:
        return few
    deepest = depth = 0
    for bracket in re.findall(rb"[\[\]{}]", STRINGS.sub(b"", text)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


__all__ = ["BrokenFrame", "Frame", "FrameReader", "Kind", "as_text", "encode", "encode_value"]
