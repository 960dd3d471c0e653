"""Rollout servers on the machines of a Ray cluster: joins `rollout` (servers) and `runtime` (machines).

    driver                                                a machine of the cluster
      adapter --> ClusterHost --start_actor--> RemoteActor  ServerActor: folder, ServerProcess --> supervisor --> server
              --> ClusterProcess: launch, stop, its end <-----'  Relay (TCP, cluster address) --> unix socket
              ===== requests, with the run's token ===================^

The actor on the server's machine starts, watches and ends the server's process. Ray ends the actor with the driver, and
then the supervisor ends the server. On the driver's own machine requests use the unix socket, without a TCP port.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname, socket
from typing import Any

import aiohttp

from hone.platforms.base import current_platform
from hone.processes.child import END_S, Process, ServerFailed, ServerProcess, tail_of
from hone.processes.supervisor import FOLDER
from hone.rollout.servers.host import SOCKET, Launch, Site, private_folder
from hone.rollout.servers.relay import Relay, connector_to
from hone.runtime.base import ActorLost, Call, RemoteActor, ServerDevices

ASK_S = 60.0  # deadline of a call that should return at once
LAST_LINES = 500  # of a server's log, sent when it ends


class ServerActor:
    """Runs on the server's machine: starts, watches and ends the server."""

    def __init__(self, accelerators: int, logs: str) -> None:
        """Raises FileNotFoundError if the folder of the servers' logs, in the run folder, is not there."""
        if not Path(logs).is_dir():
            raise FileNotFoundError(f"{logs} is not on {gethostname()}: all machines have to see the run folder")
        self._environment = current_platform().rollout_environment(tuple(range(accelerators)))
        self._folder = private_folder()
        self._relay = Relay(self._folder / SOCKET)
        self._server: ServerProcess | None = None

    async def open(self, address: str) -> tuple[str, str, int]:
        """(private folder, hone's interpreter, port of the relay on `address`; 0 without an address)."""
        port = await self._relay.open(address) if address else 0
        return str(self._folder), sys.executable, port

    async def free_port(self, address: str) -> int:
        """A TCP port of `address` that nothing uses now; the server may still find it taken."""
        with socket() as asked:
            asked.bind((address, 0))
            port: int = asked.getsockname()[1]
        return port

    async def launch(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: str) -> str:
        """Start the server; returns an empty string, or why it cannot be started."""
        variables = {**self._environment, **environment, FOLDER: str(self._folder)}
        self._server = ServerProcess(name, command, variables, Path(log))
        try:
            await self._server.launch()
        except ServerFailed as error:
            return str(error)
        return ""

    async def ended(self) -> tuple[str, str]:
        """Wait until the server ends; returns how it ended, and its last lines."""
        assert self._server is not None
        await self._server.wait_dead()
        return self._server.ended, self._server.last_lines(LAST_LINES)

    async def stop(self, timeout_s: float) -> str:
        """End the server with everything it started; returns an empty string, or which processes are left."""
        try:
            if self._server is not None:
                await self._server.stop(timeout_s)
        except ServerFailed as error:
            return str(error)
        return ""

    async def close(self) -> None:
        """Close the port, and remove the folder."""
        await self._relay.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ClusterProcess(Process):
    """A server that a remote actor started; if the actor dies, its server dies with it."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, actor: RemoteActor
    ) -> None:
        super().__init__(name, command, environment, log)
        self._actor = actor
        self._end: Call | None = None
        self._told: tuple[str, str] | None = None  # how it ended, and its last lines
        self._log_start = 0

    async def launch(self) -> None:
        self._log_start = self.log.stat().st_size if self.log.is_file() else 0  # earlier starts wrote there too
        given = self.name, self._command, self._environment, str(self.log)
        try:
            failed = await self._actor.ask("launch", *given, timeout_s=ASK_S)
        except (TimeoutError, RuntimeError) as error:
            raise ServerFailed(f"server {self.name} on {self._actor.address} cannot be started: {error}") from error
        if failed:
            raise ServerFailed(failed)
        self._end = self._actor.begin("ended")

    @property
    def alive(self) -> bool:
        return self._end is not None and not self._end.done()

    @property
    def ended(self) -> str:
        return self._ending()[0]

    def last_lines(self, n: int = 20) -> str:
        lines = self._ending()[1] or tail_of(self.log, n, self._log_start)
        return "\n".join(lines.splitlines()[-n:])

    def _ending(self) -> tuple[str, str]:
        if self._told is None and self._end is not None and self._end.done():
            try:
                how, lines = self._end.answer()
                self._told = f"{how} on {self._actor.address}", lines
            except RuntimeError as error:
                self._told = f"the loss of its place on {self._actor.address} ({error})", ""
        return self._told or ("", "")

    async def stop(self, timeout_s: float = 10.0) -> None:
        if self._end is None:
            return
        left = ""  # even after the server ended, its children may be left
        with suppress(ActorLost, TimeoutError):  # a silent machine ends it later
            left = await self._actor.ask("stop", timeout_s, timeout_s=timeout_s + 2 * END_S)
        await self.ends_within(END_S)  # its place is given up next, and then nobody could say how it ended
        self._ending()
        if left:
            raise ServerFailed(left)


class ClusterHost:
    """A machine of the cluster, for one server at a time; after a restart it may be another machine."""

    address = ""

    def __init__(self, name: str, devices: ServerDevices, logs: Path) -> None:
        """`name` is for errors; `logs`: the folder of the servers' logs."""
        self._name = name
        self._devices = devices
        self._logs = logs
        self._actor: RemoteActor | None = None
        self._folder = Path()
        self._port = 0

    @property
    def machine(self) -> str:
        if self._devices.is_here:
            return ""
        return self._actor.address if self._actor is not None else "another machine"

    @property
    def is_shared(self) -> bool:
        return self._devices.is_shared

    @property
    def driver(self) -> str:
        """The address at which its machine reaches this one."""
        return self._devices.driver

    async def open(self) -> Site:
        try:
            actor = await self._devices.start_actor(ServerActor, str(self._logs))
            self._folder, python = await self._enter(actor)
        except (TimeoutError, RuntimeError) as error:
            raise ServerFailed(f"{self._name} got no place in the cluster: {error}") from error
        self._actor = actor
        return Site(self._folder, python)

    async def _enter(self, actor: RemoteActor) -> tuple[Path, str]:
        """Open a port on the cluster's address if needed; returns folder and interpreter. Ends the actor on failure."""
        try:
            address = "" if self._devices.is_here else actor.address
            folder, python, self._port = await actor.ask("open", address, timeout_s=ASK_S)
        except BaseException:
            actor.leave()
            raise
        return Path(folder), python

    def process(self, name: str, launches: Sequence[Launch], log: Path) -> Process:
        assert self._actor is not None
        ((command, environment),) = launches
        return ClusterProcess(name, command, environment, log, self._actor)

    def connector(self, **options: Any) -> aiohttp.BaseConnector:
        assert self._actor is not None
        if self._port:
            return connector_to(self._actor.address, self._port, **options)
        return aiohttp.UnixConnector(str(self._folder / SOCKET), **options)

    async def meeting_place(self) -> tuple[str, int]:
        """The machine's address in the cluster, and a port that was free on it just now. Raises ServerFailed."""
        assert self._actor is not None
        try:
            port: int = await self._actor.ask("free_port", self._actor.address, timeout_s=ASK_S)
        except (TimeoutError, RuntimeError) as error:
            raise ServerFailed(f"{self._name} on {self._actor.address} has no free port: {error}") from error
        return self._actor.address, port

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            with suppress(ActorLost, TimeoutError):
                await actor.ask("close", timeout_s=END_S)
        finally:
            actor.leave()


__all__ = ["ClusterHost"]
