"""The ranks of a supervised run under torchrun: all run the same trainer and communicate in collectives.

    torchrun --nproc-per-node 4 -m hone sft run.yaml
        rank 0..3: same settings, same samples --> its part of every batch --> same metrics, same next step
        rank 0 also: writes the run folder, runs the trackers

Without torchrun there is one rank, and everything here does nothing. Ranks exchange bytes, never pickled objects. Every
wait ends after `runtime.collective_timeout_s`, or at once when another rank's process ends.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hone.config import ConfigError
from hone.platforms.base import current_platform
from hone.runtime.base import RankLost

R = TypeVar("R")

LOOK_S = 0.5  # between two looks at the parent process


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if not _joined() else dist.get_rank()


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if not _joined() else dist.get_world_size()


def is_first() -> bool:
    """Return whether this process is the one that writes the run folder."""
    return rank() == 0


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def join(timeout_s: float) -> None:
    """Join the process group of torchrun, with the platform's collectives; without torchrun, do nothing."""
    _stop_with_torchrun()
    if ranks() == 1 or _joined():
        return
    platform = current_platform()
    if platform.device != "cpu":
        platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(platform.collectives(), timeout=timedelta(seconds=timeout_s))


@functools.cache
def _stop_with_torchrun() -> None:
    """Send SIGTERM to this rank, once, when torchrun is killed, because nobody else would end it.

    The kernel's own signal of a parent's end comes once for each thread of torchrun, and a second one stops at once.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="end of torchrun", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def require_one(command: str) -> None:
    """Raise ConfigError, with the line to type instead, if torchrun started several ranks of a run that generates."""
    if ranks() > 1:
        nodes = ranks() // local_ranks()
        line = f"{command} RUN.yaml runtime.backend=ray runtime.backend.devices={local_ranks()}"
        line += f" runtime.backend.nodes={nodes}" if nodes > 1 else ""
        raise ConfigError(
            f"{command} under torchrun: runs that generate use several devices by Ray; type `{line}` without torchrun"
        )


def meet() -> None:
    """Wait until every rank has called this."""
    if _joined():
        with answered("waiting for all ranks"):
            dist.barrier()


def agree(value: int) -> int:
    """The maximum of all ranks' values."""
    if not _joined():
        return value
    largest = torch.tensor(value)
    with answered("agreeing with all ranks"):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def first_alone(work: Callable[[], R]) -> R:
    """Run `work` on rank 0, then on the others, which find its files on disk."""
    if is_first():
        result = work()
        meet()
        return result
    meet()
    return work()


def exchange(payload: bytes) -> list[bytes]:
    """Gather every rank's bytes, in rank order."""
    if not _joined():
        return [payload]
    own = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks())]
    dist.all_gather(sizes, torch.tensor([len(payload)]))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


@contextmanager
def answered(what: str) -> Iterator[None]:
    """Replace a collective's error by one that says which rank waited, and for what.

    Raises RankLost. Other errors of the block pass through.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_collective(error):
            raise
        raise RankLost(
            f"rank {rank()} of {ranks()} gave up {what}: another rank has ended, or did not answer within "
            "runtime.collective_timeout_s; see the error of the first rank that failed"
        ) from error


def _is_collective(error: RuntimeError) -> bool:
    """Return whether gloo raised it: gloo raises plain RuntimeErrors that name its source files."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
