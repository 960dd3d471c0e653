"""A process without free file descriptors waits, and blames nobody else."""

import asyncio
import errno
import resource
import subprocess
import sys

import pytest

from hone.processes import descriptors
from hone.processes.descriptors import OutOfDescriptors, is_exhausted, when_free


def test_the_soft_limit_is_raised_to_the_hard_one():
    program = "from hone.processes.descriptors import raise_limit; print(raise_limit(), raise_limit())"
    command = ["bash", "-c", f"ulimit -Sn 300; ulimit -Hn 900; {sys.executable} -c '{program}'"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split() == ["900", "900"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


def test_an_attempt_is_made_again_until_a_descriptor_is_free():
    attempts = []

    async def attempt():
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("no connection") from OSError(errno.EMFILE, "Too many open files")
        return "done"

    assert asyncio.run(when_free(attempt, 60)) == "done"
    assert len(attempts) == 3


def test_other_errors_are_not_waited_out():
    async def attempt():
        raise OSError(errno.ECONNREFUSED, "refused")

    with pytest.raises(ConnectionRefusedError):
        asyncio.run(when_free(attempt, 60))


def test_after_the_deadline_the_error_says_what_to_raise(monkeypatch):
    monkeypatch.setattr(descriptors, "AGAIN_S", 0.0)

    async def attempt():
        raise OSError(errno.ENFILE, "Too many open files in system")

    with pytest.raises(
        OutOfDescriptors, match=r"are open and .* allowed; raise the hard limit \(ulimit -Hn\)"
    ) as found:
        asyncio.run(when_free(attempt, 0.01))
    assert is_exhausted(found.value)
