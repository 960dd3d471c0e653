"""A program that is started when an episode needs it, and again after it ended: `RestartedProgram`, `loaded`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hone.envs.base import ToolLost
from hone.envs.mcp.transports import PipeTransport, Rpc
from hone.processes.restarts import Restarts

RESTARTS, RESTARTS_S = 5, 120.0


class RestartedProgram:
    """The process that all episodes of a run share. Every start but the first counts, also one that fails."""

    def __init__(self, name: str, start: Callable[[], Awaitable[PipeTransport]]) -> None:
        """`name` is for errors; `start` has its own deadline, and raises ToolLost if the program does not start."""
        self._name = name
        self._start = start
        self._transport: PipeTransport | None = None
        self._starting = asyncio.Lock()
        self._restarts = Restarts(RESTARTS, RESTARTS_S)
        self._was_started = False

    async def running(self) -> PipeTransport:
        """The process; starts it if it does not run. Raises ToolLost if it does not start, or did so too often."""
        async with self._starting:
            if self._transport is not None and self._transport.lost:
                await self.close()
            if self._transport is None:
                if self._was_started:
                    if not self._restarts.take():
                        raise ToolLost(f"{self._name} ended again and again, and is given up after {self._restarts}")
                    await asyncio.sleep(self._restarts.pause_s)
                self._was_started = True
                self._transport = await self._start()
                self._restarts.worked()
            return self._transport

    async def close(self) -> None:
        """End the process with everything that it started."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()


async def loaded(transport: PipeTransport, message: Rpc, start_timeout_s: float) -> PipeTransport:
    """Start the process of `transport`, and wait for its answer to `message`, which makes it ready.

    Raises ToolLost, with the last lines that it printed; then the process has ended.
    """
    try:
        async with asyncio.timeout(start_timeout_s):
            await transport.open()
            response = await transport.request(message)
        if "error" in response:
            raise ToolLost(str(response["error"].get("message")))
    except (ToolLost, TimeoutError) as error:
        late = f"not ready after {start_timeout_s:g} s (episode.env.start_timeout_s)"
        lines = transport.log()
        await transport.close()
        printed = f"; the last lines of its log:\n{lines}" if lines else ""
        raise ToolLost(f"{late if isinstance(error, TimeoutError) else error}{printed}") from error
    except BaseException:
        await transport.close()
        raise
    return transport


__all__ = ["RestartedProgram", "loaded"]
