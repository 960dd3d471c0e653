"""The messages of a weight channel, and the encryption that only members of a run have.

    receiver                                                        sender
      hello {session, replica, rank, version, facts}           -->
                                                               <--  welcome {}    (or: refused {reason})
      ============ from here both sides send what the transport needs ============

Each message is one ZeroMQ part of JSON. ZeroMQ's CURVE (`lock`) proves both sides, because neither can begin a
handshake without a key that comes from the run's token. It encrypts each message with keys of the connection and counts
them, so a message that is forged, changed, cut, repeated or out of order ends the connection. Tensor bytes are never
sent here.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils import z85

from hone.processes.untrusted_json import parse_json
from hone.weights.base import WeightSyncError

LARGEST_MESSAGE = 1 << 24  # bytes; ZeroMQ disconnects a peer that announces more
SIDES = ("sender", "receiver")

Message = dict[str, Any]


class BrokenMessage(WeightSyncError):
    """Bytes that are not a message of this protocol."""


def lock(socket: Any, token: str, side: str) -> None:
    """Encrypt a socket with ZeroMQ's CURVE, by keys that only who knows the token can derive.

    Raises WeightSyncError for an empty token.
    """
    if not token:
        raise WeightSyncError("the run's token is empty; both sides of a weight sync need the same token")
    keys = {one: z85.encode(hmac.digest(token.encode(), f"{one} of weights".encode(), "sha256")) for one in SIDES}
    socket.curve_secretkey, socket.curve_publickey = keys[side], zmq.curve_public(keys[side])
    if side == "sender":
        socket.curve_server = True
    else:
        socket.curve_serverkey = zmq.curve_public(keys["sender"])


def encode(message: Mapping[str, Any]) -> bytes:
    """Raises WeightSyncError for a message that the other side would refuse for its size."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LARGEST_MESSAGE:
        raise WeightSyncError(f"a {message['type']} message has {len(body)} bytes; the largest is {LARGEST_MESSAGE}")
    return body


def decode(*parts: bytes) -> Message:
    """Parse one part: a JSON object with a type. Raises BrokenMessage."""
    if len(parts) != 1:
        raise BrokenMessage(f"a message of {len(parts)} parts; expected one")
    body = parts[0]
    if len(body) > LARGEST_MESSAGE:
        raise BrokenMessage(f"a message of {len(body)} bytes; the largest is {LARGEST_MESSAGE}")
    try:
        message = parse_json(body)
    except ValueError as error:
        raise BrokenMessage(f"a message is not JSON: {body[:40]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BrokenMessage(f"a message is not an object with a type: {body[:40]!r}")
    return message


def expect(message: Mapping[str, Any], **kinds: type) -> None:
    """Raise BrokenMessage unless each named field is there with its type (bool is no int)."""
    for name, kind in kinds.items():
        value = message.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BrokenMessage(
                f"a {message['type']!s:.40} message whose {name} is {value!r:.100}, expected {kind.__name__}"
            )


def rank_token(token: str) -> str:
    """The token between training ranks and receivers. Ranks get this one only, so they never hold the run's."""
    return hmac.digest(token.encode(), b"ranks that send weights", "sha256").hex()
