"""A server that speaks over its standard input and output, such as an MCP server.

hone --socket--> supervisor --> BOOT, which becomes the command: the socket is its stdin and stdout
     <--log file------------------------------------------------ its stderr
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from hone.processes.child import ServerProcess
from hone.processes.supervisor import CHANNEL, FOLDER
from hone.processes.tree import ProcessTree

NAMES = "HONE_NAMES_OF_VARIABLES"
BOOT = f"""
import os, sys
channel = int(os.environ.pop("{CHANNEL}"))
names = os.environ.pop("{NAMES}", "")
own = {{name: os.environ[name] for name in names.split(":") if name in os.environ}} if names else os.environ
os.dup2(channel, 0)
os.dup2(channel, 1)
os.close(channel)
try:
    os.execvpe(sys.argv[1], sys.argv[1:], own)
except OSError as error:
    sys.exit(f"{{sys.argv[1]}} cannot be started: {{error.strerror}}")
"""


class PipedProcess(ServerProcess):
    """A process of this machine; after `launch`, `socket` is connected to its standard input and output."""

    socket: socket.socket

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, kept: Sequence[str] = ()
    ) -> None:
        """`kept`: the variables of hone's environment that the command gets; (): all of them."""
        own = [name for name in environment if name != FOLDER]  # the supervisor reads it, no program
        names = {NAMES: ":".join((*kept, *own))} if kept else {}
        super().__init__(name, command, {**environment, **names}, log)

    def shorten_log(self, most: int) -> None:
        """Empty the log if it has more than `most` bytes: it is a stranger's."""
        if self.log.stat().st_size > most:
            os.truncate(self.log, 0)  # the server appends
            self._log_start = 0

    def _start(self, log: IO[bytes]) -> ProcessTree:
        self.socket, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-I", "-S", "-c", BOOT, *self._command]
            return ProcessTree(command, self._environment, log, theirs.fileno())
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()


__all__ = ["PipedProcess"]
