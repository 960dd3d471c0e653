"""Limits by cgroups, where this process may make some: memory that no figure of a process shows, and what is left."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from hone.sandboxes.base import Limits, SandboxLost
from hone.sandboxes.kernel import cgroups
from hone.sandboxes.kernel.cgroups import NAME, NoGroups, own_groups
from hone.sandboxes.local import LocalSandboxes
from tests.sandboxes.available import skip_without

# of Python 3.12 and later, in a process of pytest that has threads; no child here takes a lock of theirs
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

PIPES = b"""
import fcntl, os, time
held, count = [], 0
try:
    while count < 200:
        read, write = os.pipe()
        held += [read, write]
        fcntl.fcntl(write, 1031, 1 << 20)  # F_SETPIPE_SZ
        os.set_blocking(write, False)
        try:
            while True:
                count += os.write(write, b"x" * 65536) >> 20
        except BlockingIOError:
            pass
except OSError:
    pass
time.sleep(30)
"""
BOMB = b"""
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = b"x" * (60 << 20)
        time.sleep(30)
time.sleep(30)
"""


@pytest.fixture(scope="module")
def parents() -> tuple[Path, ...]:
    """The folders in which groups of sandboxes are made here."""
    skip_without("landlock")
    try:
        groups = own_groups()
    except NoGroups as error:
        pytest.skip(f"no cgroup may be divided here: {error}")
    groups.own.remove()
    return tuple(folder.parent for folder in groups.own.folders)


def made_by(pid: int, parents: tuple[Path, ...]) -> list[Path]:
    """The groups of one process; other tests have theirs beside them."""
    return [folder for parent in parents for folder in parent.glob(f"{NAME}-*-{pid}-*")]


def test_a_program_is_limited_as_a_whole_and_nothing_is_left(parents):
    async def play() -> tuple:
        host = LocalSandboxes("landlock", Limits(memory_mb=100, processes=8, disk_mb=4))
        try:
            stops = await host.start()
            parent = host.process_ids[0]
            sandbox = host.open()
            found = [
                await sandbox.run(["python", "main.py"], files={"main.py": source}, timeout_s=60)
                for source in (BOMB, b"print(6 * 7)")
            ]
            await sandbox.close()
            made = made_by(parent, parents)
            inside = [one for folder in made for one in folder.glob("*/")]
        finally:
            await host.close()
        return stops, len(made), found, inside, made_by(parent, parents)

    stops, made, (bomb, after), inside, left = asyncio.run(play())
    assert "memory and processes by cgroup v" in stops
    assert made == len(parents)
    assert (bomb.limit, after.stdout, inside, left) == ("memory", b"42\n", [], [])


def test_the_group_of_a_killed_parent_is_removed_by_the_next_and_at_the_end(parents):
    async def play() -> list[int]:
        host = LocalSandboxes("landlock", Limits())
        found = []
        try:
            for _ in range(2):
                sandbox = host.open()
                task = asyncio.create_task(sandbox.run(["sleep", "300"], timeout_s=300))
                while len(host.process_ids) < 3:
                    await asyncio.sleep(0.01)
                found.append(host.process_ids[0])
                assert len(made_by(found[-1], parents)) == len(parents)
                assert not made_by(found[0], parents) or len(found) == 1
                os.kill(found[-1], signal.SIGKILL)
                with pytest.raises(SandboxLost):
                    await task
                await sandbox.close()
        finally:
            await host.close()
        return found

    first, second = asyncio.run(play())
    assert first != second
    assert made_by(first, parents) == made_by(second, parents) == []


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_stay(parents):
    groups = own_groups()
    child = os.fork()
    if child == 0:
        left = own_groups().of("program")
        left.make()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(made_by(child, parents)) == len(parents)
    cgroups._remove_leftovers(groups.own.version, parents)
    assert made_by(child, parents) == []
    assert len(made_by(os.getpid(), parents)) == len(parents)
    groups.own.remove()
    assert made_by(os.getpid(), parents) == []


def test_memory_of_the_kernel_counts(parents):
    """Fill pipes, whose content belongs to no process; the kernel lets a user have 64 MiB, which is over the limit."""
    group = own_groups()
    program = group.of("pipes")
    program.make()
    program.limit(24 << 20, 8)
    child = os.fork()
    if child == 0:
        program.enter()
        exec(PIPES)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert (status, program.ran_out_of_memory()) == (signal.SIGKILL, True)
    group.own.remove()
