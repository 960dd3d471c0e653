"""SIGKILL at each file operation of a function, one after the other."""

import os
import signal
import sys

from tests.forks import CONTEXT

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree", "shutil.copyfile"}


def killed_at_each_step(work, arguments, below, reset=lambda: None):
    """Call `reset`, then `work(*arguments)` in a process that is killed just before its next operation on a file.

    Yields the number of each operation on a file below the folder `below`, after the kill; the last run is not killed.
    """
    number, status = 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        number += 1
        reset()
        process = CONTEXT.Process(target=_run, args=(work, arguments, str(below), number))
        process.start()
        process.join(60)
        status = process.exitcode
        yield number
    assert status == 0, f"exit status {status} where nothing was killed"


def _run(work, arguments, below, number):
    left = number

    def count(event, given):
        nonlocal left
        writes = event == "open" and isinstance(given[1], str) and not {"w", "a", "x", "+"}.isdisjoint(given[1])
        if (writes or event in CHANGES) and str(given[0]).startswith(below):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    work(*arguments)
