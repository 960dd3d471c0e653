"""Rollout servers on machines of a cluster: where `rollout` (servers) and `runtime` (machines) meet.

    driver                                             a machine of the cluster
      adapter --> ClusterHost --Seat.open--> Guest       Quarters: folder, ServerProcess --> keeper --> server
              --> ClusterProcess: launch, stop, its end  <---'  Door (TCP, cluster address) --> unix socket
              ===== requests, with the run's token ==========================^

A server's process is started, watched and ended by the guest beside it, which Ray ends with the driver; its keeper ends
the server then. On the driver's own machine requests take the unix socket, and no door is opened.
"""

from __future__ import annotations

import ipaddress
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gaierror, gethostbyname, gethostname
from typing import Any

import aiohttp

from hone.config import Choice, ConfigError, count_as_read
from hone.platforms.base import current_platform
from hone.rollout.door import Door, connector_to
from hone.rollout.host import SOCKET, Host, LocalHost, Site, private_folder
from hone.rollout.keeper import FOLDER
from hone.rollout.server import END_S, Process, ServerFailed, ServerProcess, tail_of
from hone.runtime import RUNTIMES
from hone.runtime.base import Call, Guest, GuestLost, Seat
from hone.runtime.settings import RuntimeConfig
from hone.weights import LOOPBACK
from hone.weights.settings import CollectiveSettings, DeltaSettings, DiskSettings, WeightSyncConfig

ASK_S = 60.0  # what a guest may take for something that is done at once
LAST_LINES = 500  # of a server's log, told with its end


class Quarters:
    """What a guest on the server's machine does for it."""

    def __init__(self, accelerators: int, logs: str) -> None:
        """Raises FileNotFoundError if the folder of the servers' logs, in the run folder, is not there."""
        if not Path(logs).is_dir():
            raise FileNotFoundError(f"{logs} is not on {gethostname()}: all machines have to see the run folder")
        self._environment = current_platform().rollout_environment(tuple(range(accelerators)))
        self._folder = private_folder()
        self._door = Door(self._folder / SOCKET)
        self._server: ServerProcess | None = None

    async def open(self, address: str) -> tuple[str, str, int]:
        """(private folder, hone's interpreter, port of the door on `address`; 0 where none is asked for)."""
        port = await self._door.open(address) if address else 0
        return str(self._folder), sys.executable, port

    async def launch(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: str) -> str:
        """Start the server; empty, or why it cannot be."""
        variables = {**self._environment, **environment, FOLDER: str(self._folder)}
        self._server = ServerProcess(name, command, variables, Path(log))
        try:
            await self._server.launch()
        except ServerFailed as error:
            return str(error)
        return ""

    async def ended(self) -> tuple[str, str]:
        """Wait for the server's end: how it ended, and its last lines."""
        assert self._server is not None
        await self._server.wait_dead()
        return self._server.ended, self._server.last_lines(LAST_LINES)

    async def stop(self, timeout_s: float) -> str:
        """End the server with everything it started; empty, or what is left of it."""
        try:
            if self._server is not None:
                await self._server.stop(timeout_s)
        except ServerFailed as error:
            return str(error)
        return ""

    async def close(self) -> None:
        """Shut the door, and remove the folder."""
        await self._door.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ClusterProcess(Process):
    """A server that a guest runs; a guest that is lost has taken it along."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, guest: Guest
    ) -> None:
        super().__init__(name, command, environment, log)
        self._guest = guest
        self._end: Call | None = None
        self._told: tuple[str, str] | None = None  # how it ended, and its last lines
        self._log_start = 0

    async def launch(self) -> None:
        self._log_start = self.log.stat().st_size if self.log.is_file() else 0  # earlier lives wrote there too
        given = self.name, self._command, self._environment, str(self.log)
        try:
            failed = await self._guest.ask("launch", *given, timeout_s=ASK_S)
        except (TimeoutError, RuntimeError) as error:
            raise ServerFailed(f"server {self.name} on {self._guest.address} cannot be started: {error}") from error
        if failed:
            raise ServerFailed(failed)
        self._end = self._guest.begin("ended")

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
                self._told = f"{how} on {self._guest.address}", lines
            except RuntimeError as error:
                self._told = f"the loss of its place on {self._guest.address} ({error})", ""
        return self._told or ("", "")

    async def stop(self, timeout_s: float = 10.0) -> None:
        if self._end is None:
            return
        left = ""  # also of a server that has ended: what it started may be there still
        with suppress(GuestLost, TimeoutError):  # its keeper ends it; a machine that is silent ends it when it can
            left = await self._guest.ask("stop", timeout_s, timeout_s=timeout_s + 2 * END_S)
        if left:
            raise ServerFailed(left)


class ClusterHost:
    """A machine of the cluster, for the life of one server at a time; the next one may be on another."""

    def __init__(self, name: str, seat: Seat, logs: Path) -> None:
        """`name` is for errors; `logs`: the folder of the servers' logs."""
        self._name = name
        self._seat = seat
        self._logs = logs
        self._guest: Guest | None = None
        self._folder = Path()
        self._port = 0

    @property
    def machine(self) -> str:
        if self._seat.is_here:
            return ""
        return self._guest.address if self._guest is not None else "another machine"

    @property
    def is_shared(self) -> bool:
        return self._seat.is_shared

    @property
    def driver(self) -> str:
        """The address by which its machine reaches this one."""
        return self._seat.driver

    async def open(self) -> Site:
        try:
            guest = await self._seat.open(Quarters, str(self._logs))
            self._folder, python = await self._enter(guest)
        except (TimeoutError, RuntimeError) as error:
            raise ServerFailed(f"{self._name} got no place in the cluster: {error}") from error
        self._guest = guest
        return Site(self._folder, python)

    async def _enter(self, guest: Guest) -> tuple[Path, str]:
        """Open the door, if one is needed: private folder and interpreter. Whatever fails, no guest is left."""
        try:
            address = "" if self._seat.is_here else guest.address
            folder, python, self._port = await guest.ask("open", address, timeout_s=ASK_S)
        except BaseException:
            guest.leave()
            raise
        return Path(folder), python

    def process(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        assert self._guest is not None
        return ClusterProcess(name, command, environment, log, self._guest)

    def connector(self, **options: Any) -> aiohttp.BaseConnector:
        assert self._guest is not None
        if self._port:
            return connector_to(self._guest.address, self._port, **options)
        return aiohttp.UnixConnector(str(self._folder / SOCKET), **options)

    async def close(self) -> None:
        guest, self._guest = self._guest, None
        if guest is None:
            return
        try:
            with suppress(GuestLost, TimeoutError):
                await guest.ask("close", timeout_s=END_S)
        finally:
            guest.leave()


def hosts_of(role: str, count: int, devices: int, runtime: RuntimeConfig | None, logs: Path) -> list[Host]:
    """Where `count` servers of a role run, each of which needs so many devices. Raises ConfigError."""
    seats: Sequence[Seat] = ()
    if runtime is not None:
        seats = RUNTIMES.get(runtime.backend.name).seats(role, "actor", count, devices, runtime)
    placed = [ClusterHost(f"server {number} of {role}", seat, logs) for number, seat in enumerate(seats)]
    return placed or [LocalHost() for _ in range(count)]


def driver_of(hosts: Sequence[Host]) -> str:
    """The address by which machines of the cluster reach this one; loopback where there are none."""
    return next((one.driver for one in hosts if isinstance(one, ClusterHost)), LOOPBACK)


def reaching(config: WeightSyncConfig, hosts: Sequence[Host]) -> WeightSyncConfig:
    """The settings of the weight sync by which these machines are reached.

    Raises ConfigError for a transport that was chosen and ends at this machine.
    """
    others = sorted({one.machine for one in hosts if one.machine})
    if not others:
        return config
    chosen: Choice | None = config.transport
    problem = f"and {sum(bool(one.machine) for one in hosts)} of {len(hosts)} rollout servers are on other machines"
    if isinstance(chosen, DiskSettings) and not chosen.folder:
        raise ConfigError(
            f"weights.transport.folder: without one, disk writes into this machine's temporary folder, {problem}; "
            "name a folder that all machines see, or choose collective"
        )
    over_ipc = isinstance(chosen, DeltaSettings) and chosen.over == "ipc"
    if chosen is not None and (chosen.name == "ipc" or over_ipc):
        key = "weights.transport.over" if over_ipc else "weights.transport"
        raise ConfigError(
            f"{key}: ipc is memory of this machine, {problem}; choose collective"
            + ("" if over_ipc else ", delta, or disk with a folder that all machines see")
        )
    if chosen is None:
        chosen = CollectiveSettings(host=driver_of(hosts))
    elif isinstance(chosen, CollectiveSettings | DeltaSettings) and _is_loopback(chosen.host):
        count_as_read(chosen)
        chosen = chosen.model_copy(update={"host": driver_of(hosts)})
    return config.model_copy(update={"transport": chosen})


def _is_loopback(host: str) -> bool:
    """Whether others who are told this address would find themselves."""
    try:
        return ipaddress.ip_address(host if ":" in host else gethostbyname(host)).is_loopback
    except (ValueError, gaierror):
        return False  # `make_sender` says what is wrong with it


__all__ = ["ClusterHost", "hosts_of", "reaching"]
