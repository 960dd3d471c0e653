"""The asyncio event loop of a run, on which rollout, environments and reward workers meet.

    synchronous run     trainer's thread   [ run ........ ]  train  [ run ........ ]  train
    after `start`       trainer's thread   start  train   [ run: waits ]  train
                        loop's thread      [ the started coroutine, and coroutines of `run` ........ ]

A coroutine may wait only within its own deadlines; `run` returns when it ends. `sys.exit()` of foreign code on the loop
is an error, and ends neither the loop nor the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from hone.runtime.foreign_tasks import END_S, cancel_in, exited, responds, serve, wind_up

R = TypeVar("R")
LOOK_S = 1.0  # between two looks at a coroutine that `run` waits for


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
            return self._drive(coroutine)
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
            cancel_in(self._runner.get_loop(), coroutine)
            raise
        return future.result(0)

    def _drive(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the caller's thread. What leaves the loop out of a task below it cancels it first."""
        loop = self._runner.get_loop()
        task = loop.create_task(coroutine)
        task.add_done_callback(lambda _: loop.stop())
        try:
            while not task.done():
                loop.run_forever()
        except BaseException:
            wind_up(loop, task)
            raise
        return loop.run_until_complete(task)  # which has ended

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
