"""The messages of a weight channel, and how each side proves that it belongs to the run.

    receiver                                                        sender
      hello {session, replica, rank, version, nonce, devices}  -->
                                    <--  challenge {nonce, proof: HMAC(token, "sender", transcript)}
      proof {proof: HMAC(token, "receiver", transcript)}       -->         (or: refused {reason})
      ============ from here each message has HMAC(key, direction, number, body) ============

A message is one or two ZeroMQ parts: JSON, preceded by 32 bytes of HMAC-SHA256 after the handshake. The key is derived
from the token and both nonces, and each direction counts its messages, so a message that is forged, changed, repeated
or out of order does not verify. Tensor bytes are never sent here.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hone.processes.untrusted_json import parse_json
from hone.weights.base import WeightSyncError

LARGEST_MESSAGE = 1 << 24  # bytes; ZeroMQ disconnects a peer that announces more

Message = dict[str, Any]


class BrokenMessage(WeightSyncError):
    """Bytes that are not a message of this protocol, or were not sent by the other side."""


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> Message:
    """Parse one JSON object with a type. Raises BrokenMessage."""
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
            raise BrokenMessage(f"a {message['type']} message whose {name} is {value!r}, expected {kind.__name__}")


def new_nonce() -> str:
    return secrets.token_hex(32)


def rank_token(token: str) -> str:
    """The token between training ranks and receivers. Ranks get this one only, so they never hold the run's."""
    return hmac.digest(token.encode(), b"ranks that send weights", "sha256").hex()


class Secret:
    """The proofs and keys that one sender and one receiver derive from the token for one connection."""

    def __init__(self, token: str, hello: Mapping[str, Any], sender_nonce: str) -> None:
        if not token:
            raise WeightSyncError("the run's token is empty; both sides of a weight sync need the same token")
        self._token = token.encode()
        self._transcript = encode({**hello, "sender_nonce": sender_nonce})

    def proof(self, side: str) -> str:
        return self._derive(f"proof of the {side}").hex()

    def proves(self, side: str, given: Any) -> bool:
        return isinstance(given, str) and given.isascii() and hmac.compare_digest(self.proof(side), given)

    def channel(self, side: str) -> Sealed:
        """The sealed messages of this connection, for `side`: "sender" or "receiver"."""
        other = {"sender": "receiver", "receiver": "sender"}[side]
        return Sealed(self._derive(f"messages of the {side}"), self._derive(f"messages of the {other}"))

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._token, purpose.encode() + b"\0" + self._transcript, "sha256")


class Sealed:
    """Messages with a MAC, numbered in each direction."""

    def __init__(self, write_key: bytes, read_key: bytes) -> None:
        self._keys = (write_key, read_key)
        self._counts = [0, 0]

    def seal(self, message: Mapping[str, Any]) -> list[bytes]:
        body = encode(message)
        if len(body) > LARGEST_MESSAGE:
            raise WeightSyncError(
                f"a {message['type']} message has {len(body)} bytes; the largest is {LARGEST_MESSAGE}"
            )
        return [self._mac(0, body), body]

    def open(self, parts: Sequence[bytes]) -> Message:
        """Open a message of two parts. Raises BrokenMessage if it is not the other side's next message."""
        if len(parts) != 2 or not hmac.compare_digest(parts[0], self._mac(1, parts[1])):
            raise BrokenMessage(
                f"message {self._counts[1] - 1} of the other side is forged, damaged, repeated or out of order"
            )
        return decode(parts[1])

    def _mac(self, direction: int, body: bytes) -> bytes:
        number = self._counts[direction]
        self._counts[direction] += 1
        return hmac.digest(self._keys[direction], number.to_bytes(8, "big") + body, "sha256")
