"""Forks one service after the other from a process that has imported everything; each may end in the middle of a write.

It is a program. Each line of its input starts one service, and is a JSON list of four values:

    run file     the settings of the service
    change       where it kills itself: at a statement that writes into a table of its registry ("INSERT commands"), or
                 at a file operation in its folder ("os.mkdir"); "" is any change
    number       at the first such change, the second, ...; 0: it does not kill itself
    when         "before" the change, or "after" it

It prints the process id, what the service says, where the service killed itself, and "ended".
"""

import gc
import json
import os
import signal
import socket
import sys

import hone.rollout.builtin.engine
import hone.workers.tenants.training  # noqa: F401 (imported before the fork)
from hone.config import load
from hone.service.server import serve
from hone.service.settings import ServeConfig

STATEMENTS = ("BEGIN", "COMMIT", "INSERT", "UPDATE", "DELETE")
FILES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def say(text):
    os.write(1, f"{text}\n".encode())


class Kill:
    """Kills this process at one of its changes on disk."""

    def __init__(self, folder, change, number, when):
        self._folder, self._change, self._left, self._when = str(folder), change, number, when
        self._connection = None
        sys.addaudithook(self._audit)

    def _audit(self, event, given):
        if self._connection is not None:
            self._connection.set_trace_callback(self._statement)
            self._connection = None
        if event == "sqlite3.connect/handle":
            self._connection = given[0]  # which is ready at the next event
        writes = event == "open" and isinstance(given[1], str) and "w" in given[1]
        if (writes or event in FILES) and str(given[0]).startswith(self._folder):
            self._count(event)

    def _statement(self, text):
        verb, *more = text.split()
        if verb in STATEMENTS:
            self._count(f"{verb} {next((one for one in more if one.islower()), '')}".strip())

    def _count(self, change):
        self._left -= change.startswith(self._change)
        if self._left or not change.startswith(self._change):
            return
        say(f"killed {self._when} {change}")
        if self._when == "after":
            sys.setprofile(self._returned)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def _returned(self, frame, event, given):
        if event in ("return", "c_return") and frame.f_code.co_filename != __file__:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        file, *at = json.loads(line)
        child = os.fork()
        if not child:
            config = load(ServeConfig, file).config
            if at[1]:
                Kill(config.root, *at)
            say(f"process {os.getpid()}")
            serve(config, socket.create_server((config.listen.host, config.listen.port)), say)
            os._exit(0)
        os.waitpid(child, 0)
        say("ended")


if __name__ == "__main__":
    main()
