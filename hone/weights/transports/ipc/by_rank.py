"""`ipc` of a run on several ranks: every training rank sends to the receivers on its own device.

    receiver        --facts: its device--> driver    (the control channel of `ipc`)
    driver          assigns each receiver to a rank; orders the ranks to open their senders
    receiver        <--address of its rank-- driver
    rank 0, 1, ...  gather each tensor together, and each sends it to its own receivers  (`rank_sender`)
    driver          <--Sent of each rank: the digests must be equal

The driver handles no tensor. It sends weights itself, as `ipc`, if they are not gathered by ranks in other processes of
this machine: a snapshot, or a trainer of one process.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from hone.weights.base import NamedTensors, RankWeights, Sent, WeightSyncError
from hone.weights.transports.bucketed.channel import Peer
from hone.weights.transports.bucketed.wire import encode, lock, rank_token
from hone.weights.transports.ipc.engine import IpcEngine
from hone.weights.transports.ipc.needs import boxes_of_ranks, wanted
from hone.weights.transports.ipc.rank_sender import Locate, OpenSender, RankLocation, SendStream, machine

COMPARED = ("digest", "tensors", "bytes")  # equal in what ranks sent that sent the same boxes


class ByRankEngine(IpcEngine):
    """Coordinates the senders of the ranks."""

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str) -> None:
        super().__init__(bucket_bytes, timeout_s, token)
        self._drops: list[Any] = []  # sockets, one to each rank that sends

    async def init_process_group(self) -> None:
        """Meet the receivers. Who sends to them depends on the weights, so `send_weights` tells them."""
        await self.channel.meet()

    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        """As `CheckpointEngine.send_weights`; raises WeightSyncError too if the ranks sent different weights."""
        if isinstance(weights, RankWeights):
            assert self._folder is not None
            found = await asyncio.to_thread(weights.order, Locate(machine(), str(self._folder.path)))
            places = [RankLocation(**one) for one in found]
            if any(_can_send(place) for place in places):
                return await self._send_by_rank(weights, places, version)
        await super().init_process_group()
        return await super().send_weights(weights, version)

    async def _send_by_rank(self, weights: RankWeights, places: Sequence[RankLocation], version: int) -> Sent:
        channel = self.channel
        texts = wanted(channel)
        if not texts:  # all are lost, and nothing has begun
            return Sent(version, "", 0, 0, lost=channel.lost())
        chosen = assign(list(texts), places)
        order = self._opening(chosen, places, version, boxes_of_ranks(chosen, texts, len(places)))
        addresses = await asyncio.to_thread(weights.order, order)
        for address in filter(None, addresses):
            self._drops.append(_connected(address["drops"], rank_token(self._token)))
        for peer, rank in chosen.items():
            await channel.send({"type": "sender", "address": addresses[rank]["receivers"]}, to=peer)
        for replica, reason in channel.lost().items():  # while the senders were opened
            self.drop(replica, reason)
        answers = await asyncio.to_thread(weights.order, SendStream(version))
        sent = {rank: answer for rank, answer in enumerate(answers) if answer}
        return _together(sent, order.boxes, chosen, channel.lost())

    def _opening(
        self, chosen: Mapping[Peer, int], places: Sequence[RankLocation], version: int, boxes: tuple[str, ...]
    ) -> OpenSender:
        assert self._folder is not None
        return OpenSender(
            folder=str(self._folder.path),
            token=rank_token(self._token),
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.channel.remaining_s(),
            version=version,
            on_device=all(
                places[rank].shares and places[rank].device in peer.facts.get("devices", ())
                for peer, rank in chosen.items()
            ),
            receivers=tuple(
                tuple((peer.replica, peer.rank) for peer, of in chosen.items() if of == rank)
                for rank in range(len(places))
            ),
            boxes=boxes,
        )

    def drop(self, replica: str, reason: str) -> None:
        super().drop(replica, reason)
        for socket in self._drops:
            socket.send(encode({"type": "drop", "replica": replica, "reason": reason}), zmq.NOBLOCK)

    async def finalize(self) -> None:
        drops, self._drops = self._drops, []
        for socket in drops:
            socket.close(linger=0)
        await super().finalize()


def assign(peers: Sequence[Peer], places: Sequence[RankLocation]) -> dict[Peer, int]:
    """Choose each receiver's sender: the rank on its device, else one whose device it sees, else any.

    Of several, the one with the fewest receivers; receivers with the best match choose first. Receivers on no rank's
    device read host memory. Those that need the same boxes share one rank's buckets, because a second sender would only
    copy once more; other boxes come from other ranks, and whole tensors from the first one.
    """
    able = [rank for rank, place in enumerate(places) if _can_send(place)]
    chosen: dict[Peer, int] = {}
    busy: Counter[int] = Counter()
    alike: dict[str, int] = {"": able[0]}  # boxes -> who sends them to receivers on no rank's device

    def match(peer: Peer, rank: int) -> int:
        device = places[rank].device
        if not device:
            return 0
        return 2 if peer.facts.get("device") == device else int(device in peer.facts.get("devices", ()))

    for peer in sorted(peers, key=lambda peer: -max(match(peer, rank) for rank in able)):
        best = min(able, key=lambda rank: (-match(peer, rank), busy[rank], rank))
        if match(peer, best):
            busy[best] += 1
        else:
            needs = peer.facts.get("wants", "")
            busy[best] += needs not in alike
            best = alike.setdefault(needs, best)
        chosen[peer] = best
    return chosen


def _can_send(place: RankLocation) -> bool:
    return place.here and place.process != os.getpid()


def _connected(address: str, token: str) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)  # a drop never waits for a rank that gathers
    lock(socket, token, "receiver")
    socket.connect(address)
    return socket


def _together(
    sent: Mapping[int, Mapping[str, Any]], boxes: Sequence[str], chosen: Mapping[Peer, int], lost: Mapping[str, str]
) -> Sent:
    """Join the statements of all ranks. Raises WeightSyncError if ranks sent the same boxes with different content."""
    for rank, one in sent.items():
        for name in COMPARED:
            first = next(other for other in sent if name == "tensors" or boxes[other] == boxes[rank])
            if one[name] != sent[first][name]:
                raise WeightSyncError(
                    f"training rank {rank} sent weights with {name} {one[name]} for version {one['version']}, rank "
                    f"{first} sent {sent[first][name]}: the ranks gathered different tensors"
                )
    found = {replica: reason for one in sent.values() for replica, reason in one["lost"].items()}
    most = max(sent.values(), key=lambda one: one["bytes"])
    same = {name: most[name] for name in ("version", *COMPARED)}
    buckets = max(one["buckets"] for one in sent.values())
    by_rank = {rank: int(one["bytes"]) for rank, one in sent.items()}
    digests: dict[str, dict[int, str]] = {}
    for peer, rank in chosen.items() if any(boxes) else ():
        digests.setdefault(peer.replica, {})[peer.rank] = sent[rank]["digest"]
    in_order = {replica: [of[rank] for rank in sorted(of)] for replica, of in digests.items()}
    return Sent(**same, buckets=buckets, lost={**found, **lost}, by_rank=by_rank, digests=in_order)


__all__ = ["ByRankEngine", "assign"]
