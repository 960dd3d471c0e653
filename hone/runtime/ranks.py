"""The processes of a run that torchrun started: each runs the same trainer, and they meet in collectives.

    torchrun --nproc-per-node 4 -m hone sft run.yaml
        rank 0..3: same settings, same samples --> each its part of every batch --> same metrics, same next step
        rank 0 also: writes the run folder, runs the trackers

Without torchrun there is one rank, and everything here does nothing. Nothing is pickled: what ranks tell each other is
bytes. Every wait ends after `runtime.collective_timeout_s`, or at once when another rank's process ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hone.platforms.base import current_platform
from hone.runtime.base import RankLost

R = TypeVar("R")


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if not _joined() else dist.get_rank()


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if not _joined() else dist.get_world_size()


def is_first() -> bool:
    """Whether this process is the one that writes the run folder."""
    return rank() == 0


def local_ranks() -> int:
    """How many ranks share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def join(timeout_s: float) -> None:
    """Meet the other ranks that torchrun started, on the platform's collectives; without torchrun, do nothing."""
    if ranks() == 1 or _joined():
        return
    platform = current_platform()
    if platform.device != "cpu":
        platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(platform.collectives(), timeout=timedelta(seconds=timeout_s))


def meet() -> None:
    """Until every rank is here."""
    if _joined():
        with answered("waiting for all ranks"):
            dist.barrier()


def agree(value: int) -> int:
    """The largest of all ranks' values."""
    if not _joined():
        return value
    largest = torch.tensor(value)
    with answered("agreeing with all ranks"):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def first_alone(work: Callable[[], R]) -> R:
    """Run `work` on rank 0, then on the others: for work that leaves on disk what they then find there."""
    if is_first():
        result = work()
        meet()
        return result
    meet()
    return work()


def exchange(payload: bytes) -> list[bytes]:
    """Every rank's bytes, by rank."""
    own = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks())]
    dist.all_gather(sizes, torch.tensor([len(payload)]))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def tell(payload: bytes) -> None:
    """The first rank's bytes for all others, which `hear` them."""
    dist.broadcast(torch.tensor([len(payload)]), 0)
    if payload:
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)


def hear() -> bytes:
    """What the first rank tells."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0)
    told = torch.empty(int(size), dtype=torch.uint8)
    if len(told):
        dist.broadcast(told, 0)
    return told.numpy().tobytes()


@contextmanager
def answered(what: str) -> Iterator[None]:
    """Turn the failure of a collective into one sentence that says who waited, and for what.

    Raises RankLost. Other errors of the block pass through.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_collective(error):
            raise
        raise RankLost(
            f"rank {rank()} of {ranks()} gave up {what}: another rank has ended, or did not answer within "
            "runtime.collective_timeout_s; the first rank that failed has said why"
        ) from error


def _is_collective(error: RuntimeError) -> bool:
    """gloo raises plain RuntimeErrors, in the words of its own source files."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
