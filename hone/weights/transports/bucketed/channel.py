"""The control channel of a weight sync: which receivers connected, what each has read, and which were lost.

    sender (event loop)                                      receiver (one thread, blocking)
      SenderChannel: ROUTER socket                             ReceiverChannel: DEALER socket
        meet: every rank has said hello         <-- wire -->     connect: the sender has welcomed it
        send(message) to all that remain         ---------->     receive()
        until(condition) of all that remain      <----------     send(message)

Every wait has the deadline of the sync, and `PATIENCE` of it for a receiver that sends nothing while it is waited for.
A receiver that is late, silent, fails, disconnects or is dropped is lost: the channel records the reason and no longer
waits for it, and the others continue.

ZeroMQ itself refuses whoever does not know the token (`wire.lock`), before it buffers a message: a message may have any
number of parts, so nothing else bounds what a stranger can make the sender hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from hone.weights import PATIENCE
from hone.weights.base import Offer, WeightSyncError
from hone.weights.transports.bucketed.wire import LARGEST_MESSAGE, BrokenMessage, Message, decode, encode, expect, lock

HANDSHAKE_MS = 5000  # by then a connection has shown that it knows the token, or is closed
LARGEST_ANSWER = 1 << 20  # bytes of one part that a receiver sends
GOODBYE = b"."  # sent on the lifeline before closing it; the outcome is in a message
HEARTBEAT_MS = 5000
FAREWELL_MS = 300  # how long the sender tries to deliver its last messages; a live receiver gets them at once
ENDINGS = (  # of a connection, as ZeroMQ reports them
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
LINGER_MS = 2000  # how long a receiver tries to deliver its last message
FACTS = {"device": str, "holds": str, "group": str, "devices": list, "mapped": list, "backends": list}  # lists of text


class Peer:
    """The sender's record of one rank of one replica."""

    def __init__(self, replica: str, rank: int) -> None:
        self.replica = replica
        self.rank = rank
        self.identity = b""
        self.facts: Mapping[str, Any] = {}  # what it reported about its process
        self.ready = False
        self.taken = -1  # number of the last bucket that it has finished reading
        self.done = False
        self.lost = ""  # why it was lost
        self.heard_at = -math.inf  # the time of its last message

    @property
    def name(self) -> str:
        return f"{self.replica}/{self.rank}"

    @property
    def met(self) -> bool:
        """Return whether it has connected."""
        return bool(self.identity)

    @property
    def left(self) -> bool:
        return not self.lost


class SenderChannel:
    """The sender's end, for one sync."""

    def __init__(
        self, session: str, version: int, receivers: Sequence[tuple[str, int]], token: str, timeout_s: float
    ) -> None:
        """`receivers`: replica and rank of each process that will connect."""
        self.session = session
        self.version = version
        self.peers = [Peer(replica, rank) for replica, rank in receivers]
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.patience_s = timeout_s * PATIENCE
        self._changed = asyncio.Event()
        self._known: dict[bytes, Peer] = {}
        # The process's own context is never terminated: that would wait, without a deadline, for all unsent messages.
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        for option, value in (
            (zmq.MAXMSGSIZE, LARGEST_ANSWER),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.SNDHWM, 0),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
        lock(self._socket, token, "sender")
        self._reader: asyncio.Task[None] | None = None

    def bind(self, address: str) -> str:
        """Listen at a ZeroMQ address; a tcp one may end in `:*`. Returns the address to connect to."""
        self._socket.bind(address)
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def left(self) -> Iterator[Peer]:
        return (peer for peer in self.peers if peer.left)

    def lose(self, peer: Peer, reason: str) -> None:
        if peer.left and not peer.done:
            peer.lost = reason
            self._changed.set()

    def drop(self, replica: str, reason: str) -> None:
        for peer in self.peers:
            if peer.replica == replica:
                self.lose(peer, reason)

    def lost(self) -> dict[str, str]:
        """Replica -> the reason. If one rank is lost, the whole replica is."""
        return {peer.replica: f"its rank {peer.rank}: {peer.lost}" for peer in self.peers if peer.lost}

    async def meet(self) -> None:
        """Return when every rank has connected or is lost."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="weight channel: reader")
        await self.until(lambda peer: peer.met, "come to receive")

    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def gone(self, name: str) -> None:
        """Called when the process of a peer has ended or disconnected."""
        for peer in self.peers:
            if peer.name == name:
                self.lose(peer, "it died, or disconnected before it had everything")

    async def until(self, condition: Callable[[Peer], bool], what: str) -> None:
        """Return when `condition` holds for every remaining peer; one that misses the deadline is lost."""
        begun = time.monotonic()
        while waiting := [peer for peer in self.left() if not condition(peer)]:
            self._changed.clear()
            limits = {peer: min(self._deadline, max(begun, peer.heard_at) + self.patience_s) for peer in waiting}
            try:
                async with asyncio.timeout(min(limits.values()) - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                now = time.monotonic()
                for peer in (one for one, limit in limits.items() if limit <= now):
                    within_s = self._timeout_s if now >= self._deadline else self.patience_s
                    late = f"the sender waited for {peer.name} to {what} weight version {self.version}"
                    self.lose(peer, f"{late}; it did not within {within_s:g} s")
            if self._reader is not None and self._reader.done():
                self._reader.result()  # raises the error of a reader that failed

    async def send(self, message: Mapping[str, Any], to: Peer | None = None) -> None:
        """Send to one peer, or to all remaining peers that are not done."""
        for peer in [to] if to is not None else [peer for peer in self.left() if not peer.done]:
            await self._send_to(peer, message)

    async def _send_to(self, peer: Peer, message: Mapping[str, Any]) -> None:
        if not peer.met:
            return
        try:
            await self._socket.send_multipart([peer.identity, encode(message)])
        except zmq.ZMQError as error:
            self.lose(peer, f"it disconnected ({error})")

    async def close(self) -> None:
        """Notify lost peers that may still be alive, and stop listening."""
        for peer in self.peers:
            if peer.lost:
                await self._send_to(peer, {"type": "abort", "reason": peer.lost})
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        self._socket.close(linger=FAREWELL_MS)

    async def _read(self) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart()
            peer = self._known.get(identity)
            try:
                if peer is None:
                    await self._greet(identity, decode(*parts))
                elif peer.left:
                    self._record(peer, decode(*parts))
            except BrokenMessage as error:
                if peer is not None:
                    self.lose(peer, str(error))  # ignore bad messages of connections that no rank has
            self._changed.set()

    def _record(self, peer: Peer, message: Message) -> None:
        kind = message["type"]
        peer.heard_at = time.monotonic()
        if kind == "ready":
            peer.ready = True
        elif kind == "taken":
            expect(message, bucket=int)
            if message["bucket"] != peer.taken + 1:
                raise BrokenMessage(f"it acknowledged bucket {message['bucket']} where {peer.taken + 1} was due")
            peer.taken += 1
        elif kind == "done":
            peer.done = True
        elif kind == "failed":
            expect(message, reason=str)
            self.lose(peer, message["reason"])
        else:
            raise BrokenMessage(f"it sent an unknown message {kind[:40]!r}")

    async def _greet(self, identity: bytes, message: Message) -> None:
        """Answer the first message of a connection."""
        if message["type"] != "hello":
            return
        try:
            refusal = self._hello(identity, message)
        except BrokenMessage as error:
            refusal = str(error)
        answer = {"type": "refused", "reason": refusal} if refusal else {"type": "welcome"}
        with contextlib.suppress(zmq.ZMQError):  # it disconnected
            await self._socket.send_multipart([identity, encode(answer)])

    def _hello(self, identity: bytes, message: Message) -> str:
        """Take in a rank; return the reason to refuse it, or an empty string."""
        expect(message, session=str, replica=str, rank=int, version=int, facts=dict)
        _expect_facts(message["facts"])
        if message["session"] != self.session or message["version"] != self.version:
            return f"this sender is at weight version {self.version}, asked was for {message['version']}"
        wanted = [p for p in self.peers if (p.replica, p.rank) == (message["replica"], message["rank"])]
        if not wanted or wanted[0].met or not wanted[0].left:
            return f"rank {message['rank']} of replica {message['replica'][:80]!r} is not expected (any more)"
        peer = wanted[0]
        peer.identity, peer.facts, peer.heard_at = identity, message["facts"], time.monotonic()
        self._known[identity] = peer
        return ""


def _expect_facts(facts: Mapping[str, Any]) -> None:
    """Raise BrokenMessage if facts that hone's transports read are of another type; other transports have others."""
    known = {name: kind for name, kind in FACTS.items() if name in facts}
    expect({**facts, "type": "hello"}, **known)
    for name in known:
        if not all(isinstance(one, str) for one in facts[name]):
            raise BrokenMessage(f"a hello message whose {name} is {facts[name]!r:.100}, expected texts")


class ReceiverChannel:
    """A receiver's end, for one sync."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        self.name = f"{offer.replica}/{rank}"
        self._offer = offer
        self._rank = rank
        self._deadline = time.monotonic() + offer.timeout_s
        self._met = False  # whether the sender has welcomed it
        self._early: list[Message] = []  # arrived while waiting for another message
        self._lifeline: Any = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.MAXMSGSIZE, LARGEST_MESSAGE),
            (zmq.LINGER, LINGER_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),  # the sender's ZeroMQ thread answers it, even if the others are busy
            (zmq.HEARTBEAT_TIMEOUT, 4 * HEARTBEAT_MS),
        ):
            self._socket.setsockopt(option, value)
        lock(self._socket, token, "receiver")
        self._monitor = self._socket.get_monitor_socket(ENDINGS)

    def connect(self, address: str, session: str, facts: Mapping[str, Any]) -> None:
        """Connect to the sender at a ZeroMQ address, and send it `facts` about this process.

        Raises WeightSyncError if the sender is absent, refuses, or does not know the token.
        """
        self._socket.connect(address)
        hello = {
            "type": "hello",
            "session": session,
            "replica": self._offer.replica,
            "rank": self._rank,
            "version": self._offer.version,
            "facts": dict(facts),
        }
        self._socket.send(encode(hello))
        answer = decode(*self._parts("answer the hello"))
        self._refused(answer)
        if answer["type"] != "welcome":
            raise BrokenMessage(f"{self.name}: a {answer['type'][:40]} message came where a welcome was due")
        self._met = True

    def watch(self, lifeline: Any) -> None:
        """Watch a connected stream socket that carries no data: when it closes, the sender has ended."""
        self._lifeline = lifeline

    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def send(self, message: Mapping[str, Any]) -> None:
        if not self._met:
            raise WeightSyncError(f"{self.name} has not met its sender")
        self._socket.send(encode(message))

    def receive(self, what: str) -> Message:
        """The sender's next message. Raises WeightSyncError if the sender aborts, dies or misses the deadline."""
        if not self._met:
            raise WeightSyncError(f"{self.name} has not met its sender")
        if self._early:
            return self._early.pop(0)
        message = decode(*self._parts(what))
        self._refused(message)
        if message["type"] == "abort":
            raise WeightSyncError(f"{self.name}: the sender gave up: {message.get('reason')}")
        return message

    def raise_if_aborted(self) -> None:
        """Raise WeightSyncError if the sender aborted or the deadline has passed; called while waiting elsewhere."""
        while self._socket.poll(0):
            self._early.append(self.receive("go on with"))
        if self._monitor.poll(0):
            raise WeightSyncError(self._died("finish a bucket of"))
        if self.remaining_s() == 0:
            raise WeightSyncError(self._late("finish a bucket of"))

    def close(self, last_word: Mapping[str, Any]) -> None:
        """Send the outcome, if the sender is still there, and disconnect."""
        if self._met:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(encode(last_word), flags=zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS if self._met else 0)
        if self._lifeline is not None:
            with contextlib.suppress(OSError):
                self._lifeline.sendall(GOODBYE)
            self._lifeline.close()

    def _refused(self, message: Message) -> None:
        if message["type"] == "refused":
            raise WeightSyncError(f"{self.name} was refused by the sender: {str(message.get('reason'))[:200]}")

    def _parts(self, what: str) -> list[bytes]:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if self._lifeline is not None:
            poller.register(self._lifeline, zmq.POLLIN)
        events = dict(poller.poll(int(self.remaining_s() * 1000)))
        if self._socket in events:
            return self._socket.recv_multipart()
        raise WeightSyncError(self._died(what) if events else self._late(what))

    def _died(self, what: str) -> str:
        about = f"weight version {self._offer.version}"
        if not self._met:
            return (
                f"{self.name}: the sender of {about} ended the connection: it died, or does not know this run's token"
            )
        return f"{self.name}: the sender of {about} died while {self.name} waited for it to {what} it"

    def _late(self, what: str) -> str:
        about = f"weight version {self._offer.version}"
        return f"{self.name} waited for the sender to {what} {about}; it did not within {self._offer.timeout_s:g} s"
