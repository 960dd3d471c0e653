"""The child's end of a socket to hone: receives requests and sends replies (hone's end is `request_process.py`).

    hone --frames--> listener thread --queue--> main thread: requests(), reply()
         <--beats--- heartbeat thread

Standard output and error go to hone's log, never into the socket. The process ends when the socket closes.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from hone.processes.frames import Frame, FrameReader, Kind, encode
from hone.processes.supervisor import CHANNEL

BEAT_S = 5.0
NO_SOCKET = 2  # exit status of a process that hone did not start


class RequestLoop:
    """The connection to hone. Construct it before any user code runs."""

    def __init__(self) -> None:
        """Exits if hone did not start this process."""
        if CHANNEL not in os.environ:
            os.write(2, b"this program is started by hone, which gives it a socket\n")
            os._exit(NO_SOCKET)
        descriptor = int(os.environ.pop(CHANNEL))
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def requests(self) -> Iterator[Frame]:
        """The frames from hone: HELLO, which says what to load, then REQUEST. The process exits after the last one."""
        while True:
            yield self._inbox.get()

    def loaded(self, body: Mapping[str, Any]) -> None:
        """Reply to HELLO: what was loaded, or `error`."""
        self._send(Kind.HELLO, 0, body)

    def reply(self, batch: int, body: Mapping[str, Any]) -> None:
        """Reply to request `batch`; one request may have several replies.

        A forked copy of this process that returned from user code exits here, so that it cannot reply too.
        """
        self._send(Kind.REPLY, batch, body)

    def _send(self, kind: Kind, batch: int, body: Mapping[str, Any]) -> None:
        if os.getpid() != self._process:
            os._exit(0)
        with self._sending:
            self._socket.sendall(encode(kind, batch, body))

    def _listen(self) -> None:
        reader = FrameReader()
        while data := self._socket.recv(1 << 20):
            for frame in reader.feed(data):
                self._inbox.put(frame)
        os._exit(0)

    def _beat(self) -> None:
        with suppress(OSError):  # hone is gone
            while True:
                time.sleep(BEAT_S)
                self._send(Kind.BEAT, 0, {})


__all__ = ["RequestLoop"]
