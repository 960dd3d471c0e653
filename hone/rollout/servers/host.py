"""The machine that a server runs on: `Host` gives its adapter a private folder, a process and an HTTP connector.

    Host.open() -> Site          a private folder on that machine, in which the server makes its socket
        .process(launches, ...)  the server, to be started, watched and stopped
        .connector()             HTTP to its socket
        .close()                 the folder is gone; `open` begins the next life

`LocalHost` is this machine. One of a cluster is made where rollout and runtime meet (`hone.workers.hosts.cluster`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

import hone
from hone.plugins import packages
from hone.processes.child import Process, ServerProcess
from hone.processes.supervisor import FOLDER
from hone.rollout.servers.shape import ServerMachines

SOCKET = "s"  # its name in the folder; a socket's whole path has to be short


@dataclass(frozen=True, slots=True)
class Site:
    """Folder and interpreter of a server on its machine."""

    folder: Path  # private; `folder/path` holds the packages of hone and its plug-ins, and nothing else
    python: str  # the interpreter that runs hone there; empty: no process is started, because the server runs already
    span: ServerMachines | None = None  # of a server that uses several machines
    others: tuple[Site, ...] = ()  # on the server's other machines, which only compute


Launch = tuple[Sequence[str], Mapping[str, str]]
"""Command and environment of a process."""


class Host(Protocol):
    """A machine, for one server at a time."""

    @property
    def address(self) -> str:
        """HOST:PORT of a server that the run does not start (`rollout.addresses`); else empty."""

    @property
    def machine(self) -> str:
        """Its address in the cluster, if it is not this machine; else empty."""

    @property
    def is_shared(self) -> bool:
        """Return whether the trainer may use the server's devices too."""

    async def open(self) -> Site:
        """Make the folder. Raises ServerFailed if no machine is available."""

    def process(self, name: str, launches: Sequence[Launch], log: Path) -> Process:
        """A server, not started yet, with a launch for each of its machines; `log` is a file of the run folder."""

    def connector(self, **options: Any) -> aiohttp.BaseConnector:
        """An aiohttp connector to the server's socket; `options` are aiohttp's."""

    async def close(self) -> None:
        """Remove the folder, once the server has ended."""


class LocalHost:
    """This machine."""

    address = ""
    machine = ""
    is_shared = True

    def __init__(self) -> None:
        self._folder: Path | None = None

    async def open(self) -> Site:
        self._folder = private_folder()
        return Site(self._folder, sys.executable)

    @property
    def _opened(self) -> Path:
        if self._folder is None:
            raise RuntimeError("this host is not open: a server has no folder on it")
        return self._folder

    def process(self, name: str, launches: Sequence[Launch], log: Path) -> Process:
        ((command, environment),) = launches
        return ServerProcess(name, command, {**environment, FOLDER: str(self._opened)}, log)

    def connector(self, **options: Any) -> aiohttp.BaseConnector:
        return aiohttp.UnixConnector(str(self._opened / SOCKET), **options)

    async def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def private_folder() -> Path:
    """A folder that only this user can enter: the server's socket, and a path with hone's package and plug-ins alone.

    A socket's path has to be short; and the folder that holds `hone` may hold a torch that is not the server's.
    """
    folder = Path(tempfile.mkdtemp(prefix="hone-"))
    (folder / "path").mkdir()
    for package in (Path(hone.__file__).parent, *packages().values()):
        (folder / "path" / package.name).symlink_to(package.absolute())
    return folder


__all__ = ["SOCKET", "Host", "Launch", "LocalHost", "Site"]
