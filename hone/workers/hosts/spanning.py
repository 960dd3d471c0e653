"""One server on several machines of a Ray cluster: `SpanningHost`, of a `ClusterHost` for each machine.

    driver                                      machine 0                          machine 1, 2, ...
      adapter --> SpanningHost ---actors------> the server: API, first ranks       followers: the other ranks
              --> SpanningProcess: all or none      '------ the engine's own connections ------'
              ===== requests ==================^
      sender  ===== weights: collective ========> every rank on every machine

The machines start and end together: when the process of one has ended, the server has ended, and the rest of it is
ended before it starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from hone.processes.child import Process, ServerFailed
from hone.rollout.servers.host import Launch, Site
from hone.rollout.servers.shape import ServerMachines
from hone.runtime.base import ServerDevices
from hone.workers.hosts.cluster import ClusterHost


class SpanningHost:
    """The machines of one server; the first answers requests."""

    address = ""

    def __init__(self, name: str, devices: Sequence[ServerDevices], logs: Path) -> None:
        """`devices`: the devices of each machine."""
        self._machines = [ClusterHost(f"{name}, machine {n}", one, logs) for n, one in enumerate(devices)]

    @property
    def machine(self) -> str:
        """A machine of the server that is not the driver's."""
        return next((one.machine for one in self._machines if one.machine), "")

    @property
    def is_shared(self) -> bool:
        return any(one.is_shared for one in self._machines)

    @property
    def driver(self) -> str:
        return self._machines[0].driver

    async def open(self) -> Site:
        opening = [asyncio.ensure_future(one.open()) for one in self._machines]
        try:
            sites = await asyncio.gather(*opening)
            places = await asyncio.gather(*(one.meeting_place() for one in self._machines))
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            await self.close()
            raise
        addresses, port = tuple(address for address, _ in places), places[0][1]
        first, *others = [replace(site, span=ServerMachines(addresses, n, port)) for n, site in enumerate(sites)]
        return replace(first, others=tuple(others))

    def process(self, name: str, launches: Sequence[Launch], log: Path) -> Process:
        logs = [log, *(log.with_suffix(f".{n}{log.suffix}") for n in range(1, len(launches)))]
        parts = [
            one.process(name, [launch], file) for one, launch, file in zip(self._machines, launches, logs, strict=True)
        ]
        return SpanningProcess(name, parts, log)

    def connector(self, **options: Any) -> aiohttp.BaseConnector:
        return self._machines[0].connector(**options)

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._machines))


class SpanningProcess(Process):
    """The processes of one server, one on each machine."""

    def __init__(self, name: str, parts: Sequence[Process], log: Path) -> None:
        super().__init__(name, [], {}, log)
        self._parts = parts
        self._first: Process | None = None  # that ended

    async def launch(self) -> None:
        self._first = None
        try:
            await asyncio.gather(*(part.launch() for part in self._parts))
        except BaseException:
            with suppress(ServerFailed):
                await self.stop(1.0)
            raise
        self._first = None  # while they started, some had not begun

    @property
    def alive(self) -> bool:
        if self._first is None:
            self._first = next((part for part in self._parts if not part.alive), None)
        return self._first is None

    @property
    def ended(self) -> str:
        return "" if self.alive or self._first is None else self._first.ended

    def last_lines(self, n: int = 20) -> str:
        """The lines of the process that ended first, otherwise of the one that answers requests."""
        return (self._first or self._parts[0]).last_lines(n)

    async def stop(self, timeout_s: float = 10.0) -> None:
        stopped = await asyncio.gather(*(part.stop(timeout_s) for part in self._parts), return_exceptions=True)
        for error in stopped:
            if isinstance(error, BaseException):
                raise error


__all__ = ["SpanningHost", "SpanningProcess"]
