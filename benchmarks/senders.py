"""The weight sync of several training ranks: one sender against one sender per rank.

    python benchmarks/senders.py                       # 0.25 GB, 2 and 4 ranks, one receiver for each
    python benchmarks/senders.py --ranks 4 --gb 0.5 --rounds 5

Ranks hold a shard of each tensor and gather it by gloo, in processes of their own; receivers are processes too, and
each proves the digest of what it received. `one sender`: all ranks gather, and only rank 0 has receivers. `one per
rank`: each rank sends to one receiver. Extra memory is what a rank's peak resident size grows by in the first sync,
which maps the buckets; each way has its own processes. Neither way has Ray, so the path through its object store, which
both avoid, is not in the figures.
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

from hone.platforms.base import current_platform
from hone.weights.base import Full, NamedTensor, RankWeights
from hone.weights.delivery import receive
from hone.weights.transports import by_rank
from hone.weights.transports.rank_sender import Locate, RankSender

TOKEN = secrets.token_hex(16)
TIMEOUT_S = 300.0
EACH = 16 << 20  # bytes of one tensor


def sending(pipe: Connection, rank: int, world: int, store: str, count: int) -> None:
    """One rank: carries out orders until told `stop`; answers each with its peak resident bytes too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    shards = [torch.randn(EACH // 4 // world) for _ in range(count)]
    sender = RankSender()

    def gathered() -> Iterator[NamedTensor]:
        for number, shard in enumerate(shards):
            whole = torch.empty(EACH // 4)
            dist.all_gather(list(whole.chunk(world)), shard)
            yield f"layer.{number}.weight", whole

    for _ in gathered():  # gloo's own buffers are there before the first sync
        pass
    while (order := pipe.recv()) != "stop":
        pipe.send((sender.follow(order, rank, lambda needs: gathered()), current_platform().memory().peak))


def receiving(pipe: Connection) -> None:
    """One receiver: takes offers until told `stop`."""
    torch.set_num_threads(1)
    while (given := pipe.recv()) != "stop":
        offer, token = given
        with receive(offer, 0, token, copy=False) as delivery:
            for _ in delivery:
                pass
        pipe.send(delivery.digest)


class Ranks(RankWeights):
    """The weights of all ranks; with `one`, only rank 0 may have receivers."""

    def __init__(self, pipes: Sequence[Connection], one: bool) -> None:
        self._pipes = pipes
        self._one = one
        self.peaks: list[int] = []

    def __iter__(self) -> Iterator[NamedTensor]:
        raise RuntimeError("the ranks send, not the driver")

    def order(self, order: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        answers, peaks = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        self.peaks = list(peaks)
        if isinstance(order, Locate) and self._one:
            return [{**answer, "here": rank == 0} for rank, answer in enumerate(answers)]
        return list(answers)


async def sync(engine: by_rank.ByRankEngine, weights: Ranks, receivers: Sequence[Connection], version: int) -> Any:
    """One whole sync, proven."""
    names = [f"r{number}" for number in range(len(receivers))]
    engine.build_topology(dict.fromkeys(names, 1))
    offer = engine.prepare(version, Full())
    for name, pipe in zip(names, receivers, strict=True):
        pipe.send((offer.for_replica(name).to_json(), TOKEN))
    await engine.init_process_group()
    sent = await engine.send_weights(weights, version)
    digests = [await asyncio.to_thread(pipe.recv) for pipe in receivers]
    await engine.finalize()
    if sent.lost or set(digests) != {sent.digest}:
        raise SystemExit(f"the receivers have {digests}, sent was {sent}")
    return sent


async def measure(count: int, one: bool, arguments: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    tensors = max(1, int(arguments.gb * 1e9) // EACH)
    engine = by_rank.ByRankEngine(arguments.bucket_mib << 20, TIMEOUT_S, TOKEN)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(2 * count)]
        ours = [pair[0] for pair in pairs]
        processes = [
            context.Process(target=sending, args=(pairs[rank][1], rank, count, f"{folder}/store", tensors), daemon=True)
            for rank in range(count)
        ]
        processes += [context.Process(target=receiving, args=(pair[1],), daemon=True) for pair in pairs[count:]]
        for process in processes:
            process.start()
        weights = Ranks(ours[:count], one)
        weights.order(Locate("", folder))  # every rank is ready
        before = weights.peaks
        seconds = []
        for version in range(arguments.rounds + 1):
            begun = time.perf_counter()
            sent = await sync(engine, weights, ours[count:], version)
            seconds.append(time.perf_counter() - begun)
            if version == 0:
                extra = [(after - start) / 2**20 for start, after in zip(before, weights.peaks, strict=True)]
        await engine.close()
        for pipe in ours:
            pipe.send("stop")
        for process in processes:
            process.join(10)
    gigabytes = {rank: round(size / 1e9, 3) for rank, size in sent.by_rank.items()}
    print(f"{count} ranks, {'one sender' if one else 'one per rank':<12}  GB sent by rank {gigabytes}")
    print(f"  extra memory by rank {[round(size) for size in extra]} MiB, median {median(seconds[1:]):.2f} s a sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gb", type=float, default=0.25, help="size of the model, 1e9 bytes")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    for count in arguments.ranks:
        for one in (True, False):
            asyncio.run(measure(count, one, arguments))


if __name__ == "__main__":
    main()
