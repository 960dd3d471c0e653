"""The weight sync of several training ranks: whole tensors from one sender and from all, and boxes from all.

    python benchmarks/senders.py                       # 0.25 GB, 2, 4 and 8 ranks, one receiver for each
    python benchmarks/senders.py --ranks 4 --gb 0.5 --rounds 5 --layouts tensor

Ranks hold a shard of each tensor (rows), in processes of their own; receivers are processes too, and each proves the
digest of what it received.

    one sender   all ranks gather all tensors by gloo, and only rank 0 has receivers
    all, whole   all ranks gather all tensors, and each sends them to one receiver
    all, boxes   each rank gets the boxes that its receiver needs from the others, and sends these

The receivers are the ranks of one rollout server. `tensor`: half of the matrices are cut by rows and half by columns.
`expert`: four tensors of five are experts, of which each rank needs its own; the others are cut by rows and columns.
In a run, boxes are learned from a first sync that brings whole tensors; here receivers know them from the start.

`sent`: bytes that a rank puts into its buckets. `received`: bytes of boxes that a rank gets from others to send them,
or of whole tensors without its own part. Extra memory is what a rank's peak resident size grows by in one sync that
maps the buckets; each way has its own processes. No way has Ray, so the path through its object store is not in the
figures.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.engines.fsdp2.exchange import everyones_boxes, exchange, moves
from hone.engines.parts import Piece
from hone.models.parts.boxes import Box, Boxed, BoxMap, from_text, lengths, narrowed, nothing, to_text, whole
from hone.models.parts.views import Reads, viewed
from hone.platforms.base import current_platform
from hone.weights.base import Full, NamedTensor, RankWeights
from hone.weights.transports.bucketed.channel import Peer
from hone.weights.transports.ipc import by_rank
from hone.weights.transports.ipc.rank_sender import Locate, Needs, RankLocation, RankSender
from hone.weights.wants import Wants, watched

TOKEN = secrets.token_hex(16)
TIMEOUT_S = 300.0
SHAPE = (1024, 4096)  # of one tensor, in float32: 16 MiB
EACH = 16 << 20
ASSIGN = by_rank.assign
WAYS = ("one sender", "all, whole", "all, boxes")


class RowShard:
    """Rows of a tensor, of which each rank has as many (a `hone.engines.parts.Shard`)."""

    shape = SHAPE
    is_owner = True

    def __init__(self, rank: int, world: int) -> None:
        self._rows = SHAPE[0] // world
        self._first = rank * self._rows

    def pieces(self) -> list[Piece]:
        return [Piece((self._first, 0), (self._rows, SHAPE[1]), (slice(0, self._rows), slice(0, SHAPE[1])))]

    def local_shape(self) -> list[int]:
        return [self._rows, SHAPE[1]]


def name_of(number: int, layout: str) -> str:
    return f"{'experts' if layout == 'expert' and number % 5 else 'layer'}.{number}.weight"


def needed(name: str, rank: int, world: int) -> Box:
    """Return the box of a tensor that one rank of a server needs."""
    kind, digits, _ = name.split(".")
    number = int(digits)
    if kind == "experts":
        return whole(SHAPE) if number % world == rank else nothing(SHAPE)
    dim = number % 2
    step = SHAPE[dim] // world
    return tuple((rank * step, (rank + 1) * step) if one == dim else (0, SHAPE[one]) for one in (0, 1))


class Sending:
    """One rank: its rows of each tensor."""

    def __init__(self, rank: int, world: int, names: Sequence[str]) -> None:
        self._rank, self._world = rank, world
        self._shard: Any = RowShard(rank, world)
        self._parts = {name: torch.randn(self._shard.local_shape()) for name in names}
        self._held = everyones_boxes(self._all())
        self.received = 0  # bytes, in the last sync

    def _all(self) -> list[tuple[str, Tensor, Any]]:
        return [(name, part, self._shard) for name, part in self._parts.items()]

    def stream(self, needs: Needs) -> Iterator[NamedTensor]:
        """The tensors that this rank sends: whole, or boxes in tensors that only look whole."""
        self.received = 0
        return self._boxes(needs) if any(needs) else self._gathered()

    def _gathered(self) -> Iterator[NamedTensor]:
        for name, part in self._parts.items():
            found = torch.empty(SHAPE)
            dist.all_gather(list(found.chunk(self._world)), part)
            self.received += found.nbytes - part.nbytes
            yield name, found

    def _boxes(self, texts: Needs) -> Iterator[NamedTensor]:
        maps = [from_text(text or "") for text in texts]
        needs: list[BoxMap] = [
            {name: one.get(name, Boxed(SHAPE, whole(SHAPE))) for name in self._parts} for one in maps
        ]
        for name, part, boxed in exchange(self._all(), self._held, needs, EACH):
            of_all = moves(self._held[name], tuple(need[name].box for need in needs))
            mine = [one.box for one in of_all if one.target == self._rank != one.source]
            self.received += sum(torch.Size(lengths(box)).numel() * part.element_size() for box in mine)
            yield name, viewed(name, part, Reads(), boxed)


def sending(pipe: Connection, rank: int, world: int, store: str, names: Sequence[str]) -> None:
    """One rank: carries out orders until told `stop`; answers each with peak resident and received bytes too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    weights, sender = Sending(rank, world, names), RankSender()
    for _ in weights.stream(("",)):  # gloo's own buffers are there before the first sync
        pass
    while (order := pipe.recv()) != "stop":
        pipe.send((sender.follow(order, rank, weights.stream), current_platform().memory().peak, weights.received))


def receiving(pipe: Connection, rank: int, world: int, names: Sequence[str], boxes: bool) -> None:
    """One receiver: takes offers until told `stop`; with `boxes`, it knows from the start what its loader reads."""
    torch.set_num_threads(1)
    wants = Wants()
    known = to_text({name: Boxed(SHAPE, needed(name, rank, world)) for name in names}) if boxes else ""
    while (given := pipe.recv()) != "stop":
        wants.text = known
        offer, token = given
        with wants.learning(offer, rank, token) as (delivery, reads):
            for name, tensor in watched(delivery, reads):
                part = narrowed(tensor, needed(name, rank, world))
                if 0 not in part.shape:
                    part.read()  # type: ignore[attr-defined]
        pipe.send(delivery.digest)


class Ranks(RankWeights):
    """The weights of all ranks; with `one`, only rank 0 may have receivers."""

    def __init__(self, pipes: Sequence[Connection], one: bool) -> None:
        self._pipes = pipes
        self._one = one
        self.peaks: list[int] = []
        self.received: list[int] = []

    def __iter__(self) -> Iterator[NamedTensor]:
        raise RuntimeError("the ranks send, not the driver")

    def order(self, order: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        answers, peaks, received = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        self.peaks, self.received = list(peaks), list(received)
        if isinstance(order, Locate) and self._one:
            return [{**answer, "here": rank == 0} for rank, answer in enumerate(answers)]
        return list(answers)


async def sync(engine: by_rank.ByRankEngine, weights: Ranks, receivers: Sequence[Connection], version: int) -> Any:
    """One whole sync, proven."""
    engine.build_topology({"server": len(receivers)})
    offer = engine.prepare(version, Full()).for_replica("server").to_json()
    for pipe in receivers:
        pipe.send((offer, TOKEN))
    await engine.init_process_group()
    sent = await engine.send_weights(weights, version)
    digests = [await asyncio.to_thread(pipe.recv) for pipe in receivers]
    await engine.finalize()
    if sent.lost or digests != [sent.to("server", rank).digest for rank in range(len(receivers))]:
        raise SystemExit(f"the receivers have {digests}, sent was {sent}")
    return sent


def own_rank(peers: Sequence[Peer], places: Sequence[RankLocation]) -> dict[Peer, int]:
    """Each receiver gets its weights from the rank of its own number, as if it were on the same device."""
    return {peer: peer.rank for peer in peers}


async def measure(count: int, way: str, layout: str, arguments: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    names = [name_of(number, layout) for number in range(max(1, int(arguments.gb * 1e9) // EACH))]
    one = way == WAYS[0]
    by_rank.assign = ASSIGN if one else own_rank
    engine = by_rank.ByRankEngine(arguments.bucket_mib << 20, TIMEOUT_S, TOKEN)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(2 * count)]
        ours = [pair[0] for pair in pairs]
        theirs = [pair[1] for pair in pairs]
        store = f"{folder}/store"
        ranks = [(sending, (theirs[rank], rank, count, store, names)) for rank in range(count)]
        others = [(receiving, (theirs[count + rank], rank, count, names, way == WAYS[2])) for rank in range(count)]
        processes = [context.Process(target=what, args=given, daemon=True) for what, given in (*ranks, *others)]
        for process in processes:
            process.start()
        for pipe in theirs:  # the end of a process is then the end of its pipe
            pipe.close()
        weights = Ranks(ours[:count], one)
        weights.order(Locate("", folder))  # every rank is ready
        before = weights.peaks
        seconds = []
        for version in range(arguments.rounds + 1):
            begun = time.perf_counter()
            sent = await sync(engine, weights, ours[count:], version)
            seconds.append(time.perf_counter() - begun)
            if version == 0:
                extra = [(after - start) >> 20 for start, after in zip(before, weights.peaks, strict=True)]
        await engine.close()
        for pipe in ours:
            pipe.send("stop")
        for process in processes:
            process.join(10)
    mib = [sent.by_rank.get(rank, 0) >> 20 for rank in range(count)]
    print(f"{count} ranks, {layout}, {way:<12}  MiB sent {mib}, received {[size >> 20 for size in weights.received]}")
    print(f"  extra memory {extra} MiB, median {median(seconds[1:]):.2f} s a sync", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layouts", nargs="+", default=["tensor", "expert"], choices=["tensor", "expert"])
    parser.add_argument("--gb", type=float, default=0.25, help="size of the model, 1e9 bytes")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    for count in arguments.ranks:
        for layout in arguments.layouts:
            for way in WAYS:
                asyncio.run(measure(count, way, layout, arguments))


if __name__ == "__main__":
    main()
