"""The asyncio event loop of a run, on which rollout, environments and reward workers meet.

    synchronous run     trainer's thread   [ run ........ ]  train  [ run ........ ]  train
    after `start`       trainer's thread   start  train   [ run: waits ]  train
                        loop's thread      [ the started coroutine, and coroutines of `run` ........ ]

A coroutine may wait only within its own deadlines; `run` returns when it ends. `sys.exit()` of foreign code on the loop
is an error, and ends neither the loop nor the process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from hone.runtime.foreign_tasks import exited, responds, serve

R = TypeVar("R")
LOOK_S = 1.0  # between two looks at a coroutine that `run` waits for
END_S = 30.0  # for a cancelled coroutine, and for the thread to end


class EventLoop:
    """Runs coroutines for a synchronous trainer: one at a time, or beside its training.

    The caller's thread drives the loop until the first `start`, because an engine in the trainer's process computes
    on it: a thread has its own gradient mode and its own OpenMP threads. Then a thread of its own drives it, and the
    rollout must be in other processes.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run one coroutine to its end. An interrupt cancels it, and is raised when it has ended."""
        try:
            return self._run(coroutine)
        except SystemExit as error:
            raise exited(error) from error

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._thread is None:
            return self._runner.run(coroutine)
        if self._thread is threading.current_thread():
            coroutine.close()
            raise RuntimeError(
                "EventLoop.run was called by a coroutine of the loop, which would wait for itself; use await"
            )
        try:
            future = self.start(coroutine)
            while not wait([future], LOOK_S).done:
                pass
        except BaseException:
            self._end(coroutine)
            raise
        return future.result(0)

    def start(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Run a coroutine while the caller goes on. Coroutines begin in the order of these calls."""
        loop = self._runner.get_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=serve, args=(loop,), name="event loop", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    @property
    def responds(self) -> bool:
        """Return whether the loop runs what is given to it."""
        return self._thread is None or responds(self._runner.get_loop())

    def close(self) -> None:
        """Cancel what was started, and close the loop. Raises TimeoutError if a coroutine blocks the loop."""
        if self._thread is not None:
            self._runner.get_loop().call_soon_threadsafe(self._runner.get_loop().stop)
            self._thread.join(END_S)
            if self._thread.is_alive():
                raise TimeoutError(f"the event loop is blocked by a coroutine and did not stop within {END_S:g} s")
            self._thread = None
        self._runner.close()

    def _end(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Cancel a coroutine on the loop's thread, begun or not, and wait until it has cleaned up."""

        def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task.get_coro() is coroutine]
            for task in tasks:
                task.cancel()
            if not tasks:
                coroutine.close()

        self._runner.get_loop().call_soon_threadsafe(cancel)
        deadline = time.monotonic() + END_S
        while inspect.getcoroutinestate(coroutine) != inspect.CORO_CLOSED and time.monotonic() < deadline:
            time.sleep(0.01)
