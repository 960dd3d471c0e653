"""Tasks that foreign code starts on the event loop: they may call `sys.exit()`, or block the loop."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import wait

LOG = logging.getLogger("hone.runtime")
RESPONDS_S = 10.0  # for a loop that is busy


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


__all__ = ["exited", "responds", "serve"]
