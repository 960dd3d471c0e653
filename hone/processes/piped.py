"""A server that speaks over its standard input and output, such as an MCP server.

hone --socket--> supervisor --> BOOT, which becomes the command: the socket is its stdin and stdout
     <--log file------------------------------------------------ its stderr
"""

from __future__ import annotations

import socket
import sys
from typing import IO

from hone.processes.child import ServerProcess
from hone.processes.supervisor import CHANNEL
from hone.processes.tree import ProcessTree

BOOT = f"""
import os, sys
channel = int(os.environ.pop("{CHANNEL}"))
os.dup2(channel, 0)
os.dup2(channel, 1)
os.close(channel)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{{sys.argv[1]}} cannot be started: {{error.strerror}}")
"""


class PipedProcess(ServerProcess):
    """A process of this machine; after `launch`, `socket` is connected to its standard input and output."""

    socket: socket.socket

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
