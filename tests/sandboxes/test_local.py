"""Sandboxes on this machine: files, limits, and what happens when their processes are killed."""

import asyncio
import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest

from hone.processes.leftovers import remove_folder
from hone.processes.supervisor import descendants
from hone.sandboxes import local
from hone.sandboxes.attendant import UNCOUNTABLE, _used, read_inside, write_inside
from hone.sandboxes.base import Limits, SandboxLost, SandboxRefused
from hone.sandboxes.choice import examine, make_sandboxes
from hone.sandboxes.local import LocalSandboxes
from hone.testing import SandboxContract
from tests.sandboxes.available import skip_without

LIMITS = Limits(memory_mb=256, processes=16, disk_mb=8)
WAITS = b"import sys, time\nprint('begun', flush=True)\ntime.sleep(300)\n"


@pytest.fixture(scope="module", autouse=True)
def _with_a_sandbox():
    skip_without("landlock")


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def host(loop):
    async def make() -> LocalSandboxes:
        return LocalSandboxes("landlock", LIMITS)

    made = loop.run(make())
    yield made
    loop.run(made.close())


class TestLandlock(SandboxContract):
    async def make(self, limits):
        return make_sandboxes("landlock", limits)


class TestBubblewrap(SandboxContract):
    def setup_method(self):
        super().setup_method()
        skip_without("bubblewrap")

    async def make(self, limits):
        return make_sandboxes("bubblewrap", limits)


async def once(host, source: str, *argv: str, **more):
    sandbox = host.open()
    try:
        return await sandbox.run(
            ["python", "main.py", *argv], files={"main.py": source.encode()}, **{"timeout_s": 30, **more}
        )
    finally:
        await sandbox.close()


def test_an_error_of_the_program_is_its_result(loop, host):
    ran = loop.run(once(host, "def f():\n    return 1 / 0\nf()\n"))
    lines = ran.stderr.decode().splitlines()
    assert ran.status == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "main.py", line 3')
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert loop.run(once(host, "import sys; sys.exit(7)")).status == 7
    assert loop.run(once(host, "import sys; sys.exit('no')")).stderr == b"no\n"
    assert loop.run(once(host, "import os; os.kill(os.getpid(), 11)")).status == -signal.SIGSEGV
    assert loop.run(once(host, "import atexit; atexit.register(print, 'end')")).stdout == b"end\n"


def test_the_folder_is_gone_afterwards(loop, host):
    async def play():
        sandbox = host.open()
        ran = await sandbox.run(["bash", "-c", "mkdir closed; touch closed/x; chmod 0 closed; pwd"], timeout_s=30)
        missing = await sandbox.run(["nonexistent-command"], timeout_s=30)
        await sandbox.close()
        return ran, missing

    ran, missing = loop.run(play())
    assert missing.status == 127
    assert not Path(ran.stdout.decode().strip()).exists()


def test_each_limit_has_its_name(loop, host):
    assert b"MemoryError" in loop.run(once(host, "x = b'x' * (300 << 20)")).stderr

    async def short() -> LocalSandboxes:
        return LocalSandboxes("landlock", Limits(cpu_s=1))

    brief = loop.run(short())
    assert loop.run(once(brief, "while True: pass")).limit == "cpu"
    loop.run(brief.close())


def test_a_killed_attendant_is_a_loss_and_its_program_ends(loop, host):
    async def play():
        sandbox = host.open()
        task = asyncio.create_task(
            sandbox.run(["python", "main.py"], files={"main.py": WAITS}, wanted=["x"], timeout_s=300)
        )
        await until(lambda: len(host.process_ids) == 3)
        warm, attendant, _child = host.process_ids
        os.kill(attendant, signal.SIGKILL)
        with pytest.raises(SandboxLost, match="was killed while its program ran"):
            await task
        await until(lambda: host.process_ids == [warm])
        again = await sandbox.run(["python", "-c", "print(1)"], timeout_s=30)
        await sandbox.close()
        return again

    assert loop.run(play()).stdout == b"1\n"


def test_a_killed_parent_is_a_loss_and_the_next_run_starts_another(loop, host):
    async def play():
        sandbox = host.open()
        task = asyncio.create_task(sandbox.run(["python", "main.py"], files={"main.py": WAITS}, timeout_s=300))
        await until(lambda: len(host.process_ids) == 3)
        below = host.process_ids
        os.kill(below[0], signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await task
        again = await sandbox.run(["python", "-c", "print(2)"], timeout_s=30)
        await sandbox.close()
        await until(lambda: not set(below) & set(descendants(os.getpid())))
        return again

    assert loop.run(play()).stdout == b"2\n"


def test_a_stopped_parent_is_replaced_before_anything_is_lost(loop, host, monkeypatch):
    monkeypatch.setattr(local, "TAKEN_S", 0.5)

    async def play():
        await host.start()
        stopped = host.process_ids[0]
        os.kill(stopped, signal.SIGSTOP)
        ran = await once(host, "print(3)")
        return ran, stopped, host.process_ids[0]

    ran, stopped, now = loop.run(play())
    assert (ran.stdout, stopped != now) == (b"3\n", True)


def test_what_a_killed_parent_took_along_is_a_loss_and_never_an_empty_folder(loop, host):
    async def play():
        sandbox = host.open()
        await sandbox.run(["bash", "-c", "echo 5 > n"], timeout_s=30)
        os.kill(host.process_ids[0], signal.SIGKILL)
        found = []
        for _ in range(2):
            try:
                found.append((await sandbox.run(["bash", "-c", "cat n || echo none"], timeout_s=30)).stdout)
            except SandboxLost as error:
                found.append(str(error))
        await sandbox.close()
        return found

    first, second = loop.run(play())
    assert first == b"5\n" or ("gone" in first and second == b"none\n"), (first, second)


CHAINS = """
import os
for _ in range(6):
    try:
        in_chain = os.fork() == 0
    except OSError:
        break
    while in_chain:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            pass
"""


def test_chains_of_processes_that_fork_and_end_are_ended(loop, host):
    async def play():
        found = [(await once(host, CHAINS)).limit for _ in range(3)]  # without SandboxLost
        await until(lambda: len(host.process_ids) == 1)
        return found

    assert loop.run(play()) == ["", "", ""]


def test_chains_end_with_their_killed_attendant(loop, host):
    async def play():
        task = asyncio.create_task(once(host, CHAINS + "import time; time.sleep(300)", timeout_s=300))
        await until(lambda: len(host.process_ids) > 3)
        warm, attendant, *_ = host.process_ids
        os.kill(attendant, signal.SIGKILL)
        with pytest.raises(SandboxLost, match="was killed while its program ran"):
            await task
        await until(lambda: host.process_ids == [warm])
        return (await once(host, "print(4)")).stdout

    assert loop.run(play()) == b"4\n"


def test_a_cancelled_run_ends_its_program(loop, host):
    async def play():
        sandbox = host.open()
        task = asyncio.create_task(sandbox.run(["sleep", "300"], timeout_s=300))
        await until(lambda: len(host.process_ids) == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(host.process_ids) == 1)
        await sandbox.close()

    loop.run(play())


async def until(holds) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


def test_with_network_a_program_may_connect(loop):
    server = socket.create_server(("127.0.0.1", 0))

    async def play():
        host = LocalSandboxes("landlock", Limits(network=True))
        ran = await once(
            host,
            "import socket, sys\n"
            f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 20).sendall(b'hello')\n"
            "socket.socket(socket.AF_UNIX)",
        )
        await host.close()
        return ran

    ran = loop.run(play())
    connection, _ = server.accept()
    assert connection.recv(100) == b"hello"
    assert b"PermissionError" in ran.stderr  # Unix sockets lead to the machine's own services
    connection.close()
    server.close()


def test_files_are_never_written_or_read_through_links(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (outside / "x").write_text("secret")
    (folder / "away").symlink_to(outside)
    (folder / "x").symlink_to(outside / "x")
    os.mkfifo(folder / "pipe")
    assert read_inside(str(folder), "away/x", 3) is None
    write_inside(str(folder), "away/x", b"in a folder of its own", -1)
    write_inside(str(folder), "x", b"mine", -1)
    assert ((outside / "x").read_text(), (folder / "x").read_text()) == ("secret", "mine")
    found = [read_inside(str(folder), path, 3) for path in ("x", "away/x", "away", "pipe", "none")]
    assert found == [b"min", b"in ", None, None, None]
    (folder / "closed").mkdir()
    (folder / "closed" / "x").write_text("")
    (folder / "closed").chmod(0)
    remove_folder(str(folder))
    assert not folder.exists()
    assert (outside / "x").exists()


@pytest.fixture
def deep():
    """A folder in which 1,200 folders are nested: beyond recursion, PATH_MAX and the number of open files."""
    top = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a disk takes seconds for them
    here = os.open(top, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("deep", 0o300, dir_fd=here)
        below = os.open("deep", os.O_PATH | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    yield top
    remove_folder(str(top))


def test_whatever_a_program_left_is_removed_or_replaced(deep):
    assert _used(str(deep)) == UNCOUNTABLE
    write_inside(str(deep), "deep", b"a file", -1)
    assert (deep / "deep").read_bytes() == b"a file"
    write_inside(str(deep), "deep/e", b"below", -1)
    assert read_inside(str(deep), "deep/e", 9) == b"below"
    assert _used(str(deep)) < 1 << 16
    remove_folder(str(deep))
    assert not deep.exists()


def test_a_deep_folder_is_removed(deep):
    remove_folder(str(deep))
    assert not deep.exists()


def test_what_a_program_does_to_its_folder_is_its_own_result(loop, host):
    async def play():
        sandbox = host.open()
        nested = b"import os\nfor i in range(3000):\n  os.mkdir('d'); os.chdir('d')"
        found = [await sandbox.run(["python", "a.py"], files={"a.py": nested}, timeout_s=30)]
        swap = b"import os\nos.unlink('b.py'); os.makedirs('b.py/b'); open('b.py/b/x', 'w')"
        found.append(await sandbox.run(["python", "b.py"], files={"b.py": swap}, timeout_s=30))
        found += [
            await sandbox.run(["python", name], files={name: b"print(1)"}, timeout_s=30)
            for name in ("b.py", "a.py/c.py")
        ]
        await sandbox.close()
        return found

    deep, *others = loop.run(play())
    assert deep.limit in ("disk", ""), deep
    assert [one.stdout for one in others[1:]] == [b"1\n", b"1\n"]


def test_a_sandbox_that_does_not_work_is_refused_with_the_reason(loop, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = "bwrap is not installed (the package is called bubblewrap)"
    assert loop.run(examine("bubblewrap")) == (False, f"bubblewrap: {missing}")
    with pytest.raises(SandboxRefused, match="has no url"):
        make_sandboxes("landlock", LIMITS, "http://127.0.0.1:1")
    works, stops = loop.run(examine("landlock"))
    assert works
    assert "by Landlock" in stops


def test_bubblewrap_is_looked_for_where_this_process_finds_it(loop, tmp_path, monkeypatch):
    found = tmp_path / "bwrap"
    found.write_text("#!/bin/sh\necho no namespaces today >&2\nexit 1\n")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    host = LocalSandboxes("bubblewrap", LIMITS)
    try:
        with pytest.raises(SandboxRefused) as refused:
            loop.run(host.start())
        assert "is not installed" not in str(
            refused.value
        )  # "no namespaces today", or of root that its Python is closed
    finally:
        loop.run(host.close())
