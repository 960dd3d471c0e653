"""A process whose end hangs is ended, with an exit code and a reason."""

import subprocess
import sys

import pytest

HANGS = """
import sys, threading, time
from hone.processes.closing import ends_within, exits_within
def hangs():
    time.sleep(3600)
if sys.argv[1] == "closing":
    with ends_within(0.3, "closing the run"):
        hangs()
else:
    threading.Thread(target=hangs, name="a tool").start()
    exits_within(0.3, 7)
"""


@pytest.mark.parametrize(("what", "code", "reason"), [("closing", 1, "closing the run"), ("exit", 7, "leaving the")])
def test_a_process_that_does_not_end_is_ended_with_its_stacks(what, code, reason):
    done = subprocess.run([sys.executable, "-c", HANGS, what], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert f"error: {reason}" in done.stderr
    assert "in hangs" in done.stderr
