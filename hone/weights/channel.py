"""The control channel of a weight sync: who has come, who has taken which bucket, who is gone.

    sender (event loop)                                      receiver (one thread, blocking)
      SenderChannel: ROUTER socket                             ReceiverChannel: DEALER socket
        meet: every rank has proven the token   <-- wire -->     connect: the sender has proven the token
        send(message) to all that are left       ---------->     receive()
        until(condition): all that are left      <----------     send(message)

Every wait has the deadline of the sync. A receiver that is late, fails, hangs up or is dropped is lost: it is noted
with the reason, nobody waits for it any longer, and the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zmq
import zmq.asyncio

from hone.weights.base import Offer, WeightSyncError
from hone.weights.wire import LARGEST_MESSAGE, BrokenMessage, Message, Sealed, Secret, decode, encode, expect, new_nonce

MOST_STRANGERS = 64  # that have said hello and not yet proven the token
GOODBYE = b"."  # on the lifeline, before hanging up: how it ended is said in a message
HEARTBEAT_MS = 5000
FAREWELL_MS = 300  # how long a sender tries to get its last words out: to those that live they take no time
LINGER_MS = 2000  # how long a receiver tries to get its last word out


class Peer:
    """One rank of one replica, as the sender sees it."""

    def __init__(self, replica: str, rank: int) -> None:
        self.replica = replica
        self.rank = rank
        self.identity = b""
        self.sealed: Sealed | None = None
        self.facts: Mapping[str, Any] = {}  # what it said of its process
        self.ready = False
        self.taken = -1  # number of the last bucket that it needs no more
        self.done = False
        self.lost = ""  # the reason

    @property
    def name(self) -> str:
        return f"{self.replica}/{self.rank}"

    @property
    def left(self) -> bool:
        return not self.lost


class _Stranger:
    """Somebody who said hello; what it still has to prove."""

    def __init__(self, peer: Peer, secret: Secret, hello: Mapping[str, Any]) -> None:
        self.peer = peer
        self.secret = secret
        self.hello = hello


class SenderChannel:
    """The sender's end, for one sync."""

    def __init__(self, session: str, version: int, ranks: Mapping[str, int], token: str, timeout_s: float) -> None:
        self.session = session
        self.version = version
        self.peers = [Peer(replica, rank) for replica, count in ranks.items() for rank in range(count)]
        self._token = token
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._changed = asyncio.Event()
        self._strangers: dict[bytes, _Stranger] = {}
        self._known: dict[bytes, Peer] = {}
        # The process's own context, which is never ended: ending one waits, without a deadline, for all it ever sent.
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        for option, value in (
            (zmq.MAXMSGSIZE, LARGEST_MESSAGE),
            (zmq.SNDHWM, 0),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
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
        """Replica -> why. A replica that lost one rank is lost whole."""
        return {peer.replica: f"its rank {peer.rank}: {peer.lost}" for peer in self.peers if peer.lost}

    async def meet(self) -> None:
        """Return when every rank has proven the token or is lost."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="weight channel: reader")
        await self.until(lambda peer: peer.sealed is not None, "come to receive")

    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def gone(self, name: str) -> None:
        """The process of a peer has ended, or hung up."""
        for peer in self.peers:
            if peer.name == name:
                self.lose(peer, "it died, or hung up before it had everything")

    async def until(self, condition: Callable[[Peer], bool], what: str) -> None:
        """Return when `condition` holds for every peer that is left; who is late for it is lost."""
        while waiting := [peer for peer in self.left() if not condition(peer)]:
            self._changed.clear()
            try:
                async with asyncio.timeout(self.remaining_s()):
                    await self._changed.wait()
            except TimeoutError:
                for peer in waiting:
                    late = f"the sender waited for {peer.name} to {what} weight version {self.version}"
                    self.lose(peer, f"{late}; it did not within {self._timeout_s:g} s")
            if self._reader is not None and self._reader.done():
                self._reader.result()  # a reader that broke is an error, not a silence

    async def send(self, message: Mapping[str, Any], to: Peer | None = None) -> None:
        """To one peer, or to all that are left and still want something."""
        for peer in [to] if to is not None else [peer for peer in self.left() if not peer.done]:
            await self._tell(peer, message)

    async def _tell(self, peer: Peer, message: Mapping[str, Any]) -> None:
        if peer.sealed is None:
            return
        try:
            await self._socket.send_multipart([peer.identity, *peer.sealed.seal(message)])
        except zmq.ZMQError as error:
            self.lose(peer, f"it hung up ({error})")

    async def close(self) -> None:
        """Tell those that were lost but may live, and stop listening."""
        for peer in self.peers:
            if peer.lost:
                await self._tell(peer, {"type": "abort", "reason": peer.lost})
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
                    await self._greet(identity, parts)
                elif peer.sealed is not None and peer.left:
                    self._note(peer, peer.sealed.open(parts))
            except BrokenMessage as error:
                if peer is not None:
                    self.lose(peer, str(error))  # strangers may say what they like
            self._changed.set()

    def _note(self, peer: Peer, message: Message) -> None:
        kind = message["type"]
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

    async def _greet(self, identity: bytes, parts: list[bytes]) -> None:
        if len(parts) != 1:
            return
        message = decode(parts[0])
        if message["type"] == "hello":
            refusal = self._hello(identity, message)
        elif message["type"] == "proof" and identity in self._strangers:
            refusal = self._proof(identity, message)
        else:
            return
        if refusal:
            await self._answer(identity, {"type": "refused", "reason": refusal})
        elif identity in self._strangers:
            stranger = self._strangers[identity]
            proof = {"type": "challenge", "nonce": stranger.hello["answer"], "proof": stranger.secret.proof("sender")}
            await self._answer(identity, proof)

    async def _answer(self, identity: bytes, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a stranger that hung up
            await self._socket.send_multipart([identity, encode(message)])

    def _hello(self, identity: bytes, message: Message) -> str:
        """Note who wants in; the reason to refuse it, or nothing."""
        expect(message, session=str, replica=str, rank=int, version=int, nonce=str, facts=dict)
        if message["session"] != self.session or message["version"] != self.version:
            return f"this sender is at weight version {self.version}, asked was for {message['version']}"
        wanted = [p for p in self.peers if (p.replica, p.rank) == (message["replica"], message["rank"])]
        if not wanted or wanted[0].sealed is not None or not wanted[0].left:
            return f"rank {message['rank']} of replica {message['replica'][:80]!r} is not expected (any more)"
        if len(self._strangers) >= MOST_STRANGERS:
            return "too many unproven connections"
        answer = new_nonce()
        secret = Secret(self._token, message, answer)
        self._strangers[identity] = _Stranger(wanted[0], secret, {**message, "answer": answer})
        return ""

    def _proof(self, identity: bytes, message: Message) -> str:
        stranger = self._strangers.pop(identity)
        if not stranger.secret.proves("receiver", message.get("proof")) or stranger.peer.sealed is not None:
            return "the token is not this run's"
        stranger.peer.identity, stranger.peer.facts = identity, stranger.hello["facts"]
        stranger.peer.sealed = stranger.secret.channel("sender")
        self._known[identity] = stranger.peer
        return ""


class ReceiverChannel:
    """A receiver's end, for one sync."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        self.name = f"{offer.replica}/{rank}"
        self._offer = offer
        self._rank = rank
        self._token = token
        self._deadline = time.monotonic() + offer.timeout_s
        self._sealed: Sealed | None = None
        self._early: list[Message] = []  # came while something else was waited for
        self._lifeline: Any = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.MAXMSGSIZE, LARGEST_MESSAGE),
            (zmq.LINGER, LINGER_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),  # answered by the sender's ZeroMQ thread, however busy the others are
            (zmq.HEARTBEAT_TIMEOUT, 4 * HEARTBEAT_MS),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def connect(self, address: str, session: str, facts: Mapping[str, Any]) -> None:
        """Meet the sender at a ZeroMQ address, and tell it what it should know of this process.

        Raises WeightSyncError: refused, not this run's, or absent.
        """
        self._socket.connect(address)
        hello = {
            "type": "hello",
            "session": session,
            "replica": self._offer.replica,
            "rank": self._rank,
            "version": self._offer.version,
            "nonce": new_nonce(),
            "facts": dict(facts),
        }
        self._socket.send(encode(hello))
        challenge = self._plain("challenge")
        expect(challenge, nonce=str, proof=str)
        secret = Secret(self._token, hello, challenge["nonce"])
        if not secret.proves("sender", challenge["proof"]):
            raise WeightSyncError(f"{self.name}: the sender at {address} does not know this run's token")
        self._socket.send(encode({"type": "proof", "proof": secret.proof("receiver")}))
        self._sealed = secret.channel("receiver")

    def watch(self, lifeline: Any) -> None:
        """A connected stream socket on which nothing is sent: its end is the sender's end."""
        self._lifeline = lifeline

    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def send(self, message: Mapping[str, Any]) -> None:
        if self._sealed is None:
            raise WeightSyncError(f"{self.name} has not met its sender")
        self._socket.send_multipart(self._sealed.seal(message))

    def receive(self, what: str) -> Message:
        """The sender's next message. Raises WeightSyncError if it gives up, dies, or is silent past the deadline."""
        if self._sealed is None:
            raise WeightSyncError(f"{self.name} has not met its sender")
        if self._early:
            return self._early.pop(0)
        parts = self._parts(what)
        if len(parts) == 1:
            self._refused(decode(parts[0]))
        message = self._sealed.open(parts)
        if message["type"] == "abort":
            raise WeightSyncError(f"{self.name}: the sender gave up: {message.get('reason')}")
        return message

    def raise_if_aborted(self) -> None:
        """While waiting for something else: raise WeightSyncError if the sender gave up, or time is up."""
        while self._socket.poll(0):
            self._early.append(self.receive("go on with"))
        if self._monitor.poll(0):
            raise WeightSyncError(self._died("finish a bucket of"))
        if self.remaining_s() == 0:
            raise WeightSyncError(self._late("finish a bucket of"))

    def close(self, last_word: Mapping[str, Any]) -> None:
        """Say how it ended, if there is anybody to hear it, and hang up."""
        if self._sealed is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart(self._sealed.seal(last_word), flags=zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS if self._sealed is not None else 0)
        if self._lifeline is not None:
            with contextlib.suppress(OSError):
                self._lifeline.sendall(GOODBYE)
            self._lifeline.close()

    def _plain(self, kind: str) -> Message:
        message = decode(self._parts("answer the hello")[0])
        self._refused(message)
        if message["type"] != kind:
            raise BrokenMessage(f"{self.name}: a {message['type'][:40]} message came where a {kind} was due")
        return message

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
        return f"{self.name}: the sender of {about} died while {self.name} waited for it to {what} it"

    def _late(self, what: str) -> str:
        about = f"weight version {self._offer.version}"
        return f"{self.name} waited for the sender to {what} {about}; it did not within {self._offer.timeout_s:g} s"
