"""Writes an engine's files while training goes on: from copies that nobody else holds.

save_checkpoint --copies--> jobs --one thread, in order--> files
                             `--> checkpoint_written() says when, or what went wrong
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from safetensors import SafetensorError

WRITE_S = 3600.0  # longest wait for one file: a disk that takes longer does not answer

Job = Callable[[], None]
"""Writes one file from tensors of its own."""


class Writer:
    """One thread that writes; nothing is said of a job's failure before it is asked for."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._open: list[Future[None]] = []

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin to write. What was started before and has not been asked for stays open."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hone-checkpoint")
        self._open += [self._pool.submit(job) for job in jobs]

    def done(self, wait: bool) -> bool:
        """Whether all jobs have ended; with `wait`, once they have. Raises OSError: what one of them failed with."""
        if not wait and not all(job.done() for job in self._open):
            return False
        jobs, self._open = self._open, []
        for job in jobs:
            try:
                job.result(timeout=WRITE_S)
            except SafetensorError as error:  # a full disk is an OSError everywhere else
                raise OSError(f"safetensors: {error}") from error
            except TimeoutError as error:
                raise TimeoutError(f"a file was not written within {WRITE_S:.0f} s") from error
        return True
