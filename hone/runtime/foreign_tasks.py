"""Tasks that foreign code starts on the event loop: they may call `sys.exit()`, or block the loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Coroutine
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

LOG = logging.getLogger("hone.runtime")
RESPONDS_S = 10.0  # for a loop that is busy
END_S = 30.0  # for a cancelled task, and for a thread to end


def wind_up(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Cancel a task and let it clean up within `END_S`, so that the loop can be used again.

    An interrupt or `sys.exit()` leaves the loop wherever it is, in a task below this one too. Then it leaves the loop
    once more from each task that waited for that one.
    """
    task.cancel()
    ends = time.monotonic() + END_S
    late = loop.call_later(END_S, loop.stop)
    while not task.done() and time.monotonic() < ends:
        with suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()
    late.cancel()
    loop.call_soon(loop.stop)  # one that was asked for already must not end what runs next
    with suppress(KeyboardInterrupt, SystemExit):
        loop.run_forever()
    if task.done() and not task.cancelled():
        task.exception()  # the caller raises the first one


def cancel_in(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
    """Cancel a coroutine on the loop of another thread, begun or not, and wait until it has cleaned up."""

    def cancel() -> None:
        tasks = [task for task in asyncio.all_tasks() if task.get_coro() is coroutine]
        for task in tasks:
            task.cancel()
        if not tasks:
            coroutine.close()

    loop.call_soon_threadsafe(cancel)
    deadline = time.monotonic() + END_S
    while inspect.getcoroutinestate(coroutine) != inspect.CORO_CLOSED and time.monotonic() < deadline:
        time.sleep(0.01)


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, also after a task has raised SystemExit out of it."""
    while True:
        try:
            loop.run_forever()
            return
        except SystemExit as error:
            LOG.error("a task on the event loop called sys.exit(%r); the loop goes on", error.code)


def exited(error: SystemExit) -> RuntimeError:
    """Return the error of a task that called `sys.exit()`, which would end the run with the code of success."""
    return RuntimeError(f"sys.exit({error.code!r}) was called on the event loop of the run")


def responds(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop in another thread runs what is given to it: code that blocks keeps it from that."""
    return bool(wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)], RESPONDS_S).done)


__all__ = ["END_S", "cancel_in", "exited", "responds", "serve", "wind_up"]
