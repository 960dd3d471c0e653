"""Programs that do odd things one after another: each gives a result in time, and leaves nothing behind."""

import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.processes.frames import HEADER, Kind
from hone.sandboxes.base import Limits
from hone.sandboxes.local import CANNOT_RUN, LocalSandboxes
from tests.sandboxes.available import skip_without

LIMITS = Limits(memory_mb=256, processes=12, output_kb=64, disk_mb=8)
TIMEOUT_S = 1.5
LATE_S = 20.0  # beyond the time-out: a loaded machine kills and reads slowly
WANTED = ("left", "left/x")

FIRST = """
import os, signal, sys, threading, time
def tried(act):
    try:
        act()
    except BaseException as error:
        sys.stderr.write(repr(error))
def write(to, data):
    for _ in range(1 << 22 if to < 0 else 1):
        os.write(abs(to), data)
def child(*acts):
    if os.fork() == 0:
        for act in acts:
            tried(act)
        time.sleep(300)
def nested(count):
    for _ in range(count):
        os.mkdir("d")
        os.chdir("d")
"""
SAID = {
    "frame": HEADER.pack(40, Kind.REPLY, 1, 0) + b'{"status": 0, "stdout": "", "limit": ""}',
    "huge frame": HEADER.pack((1 << 32) - 1, Kind.REPLY, 1, 0),
    "cut frame": HEADER.pack(100, Kind.REPLY, 1, 0)[:9],
    "not utf-8": b"\xff\xfe\xed\xa0\x80" * 40,
    "nul": b"\0" * 999,
    "lines": b"\n" * 60_000,
    "deep": b"[" * 50_000,
    "not a number": b'{"exit-code": NaN}\n{"exit-code": 0}\n',
}
ACTS = [
    *(f"write({to}, {data!r})" for data in SAID.values() for to in (1, 2)),
    *(f"write({to}, {SAID['frame']!r})" for to in (0, 3, 4, 5, 6, 7, 8, 9)),
    f"write(-1, {SAID['not utf-8']!r})",
    f"write(-2, {SAID['frame']!r})",
    *("os.close(0)", "os.close(1)", "os.close(2)", "os.closerange(0, 256)", "os.dup2(1, 2)", "os.dup2(2, 0)"),
    "child()",
    "child(os.setsid)",
    "child(os.setsid, child, lambda: write(1, b'from a child'))",
    "[child() for _ in range(30)]",
    "threading.Thread(target=lambda: (time.sleep(0.2), write(1, b'late'))).start()",
    "threading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
    "__import__('atexit').register(write, 1, b'at exit')",
    *("os.kill(os.getppid(), 9)", "os.kill(os.getppid(), signal.SIGSTOP)", "os.kill(-1, 9)", "os.killpg(0, 9)"),
    *("os.kill(os.getpid(), signal.SIGSTOP)", "os.abort()", "os._exit(0)", "os._exit(255)", "sys.exit('\\ud800')"),
    *("os.kill(os.getpid(), 11)", "[signal.signal(n, signal.SIG_IGN) for n in range(1, 16) if n != 9]"),
    *("os.mkfifo('left')", "os.symlink('/etc/passwd', 'left')", "os.symlink('left', 'left')", "os.mkdir('left')"),
    *("os.truncate(os.open('left', os.O_CREAT | os.O_RDWR), 1 << 40)", "open('left', 'w').write('x' * (6 << 20))"),
    "(open('left', 'w').close(), os.chmod('left', 0))",
    *("os.chmod('.', 0)", "os.rename(os.getcwd(), os.getcwd() + '-away')", "os.rmdir(os.getcwd())", "nested(2000)"),
    "(os.unlink('main.py'), os.mkdir('main.py'))",
    "[open(str(i), 'w') for i in range(20_000)]",
    *("bytearray(400 << 20)", "eval('(' * 100_000)", "__import__('ctypes').string_at(0)", "int('9' * 5000)"),
]


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["landlock", "bubblewrap"])
def host(loop, request):
    skip_without(request.param)

    async def make() -> LocalSandboxes:
        return LocalSandboxes(request.param, LIMITS)

    made = loop.run(make())
    yield made
    loop.run(made.close())


async def play(host, acts):
    """Results of a program and of the next one in the same folder, and the seconds that the first took."""
    program = FIRST + "".join(f"tried(lambda: {act})\n" for act in acts)
    sandbox = host.open()
    try:
        began = time.monotonic()
        first = await sandbox.run(
            ["python", "main.py"], files={"main.py": program.encode()}, wanted=WANTED, timeout_s=TIMEOUT_S
        )
        took = time.monotonic() - began
        second = await sandbox.run(["python", "next.py"], files={"next.py": b"print(7)"}, timeout_s=30)
        async with asyncio.timeout(LATE_S):
            while len(host.process_ids) > 1:  # the parent of the sandboxes
                await asyncio.sleep(0.01)
    finally:
        await sandbox.close()
    return first, second, took


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(ACTS), min_size=1, max_size=5))
def test_whatever_a_program_does_is_its_own_result_and_the_next_one_runs(loop, host, acts):
    first, second, took = loop.run(play(host, acts))  # without SandboxLost
    assert first.status != CANNOT_RUN, first
    assert took < TIMEOUT_S + LATE_S
    assert max(len(first.stdout), len(first.stderr)) <= LIMITS.output_kb << 10
    assert all(len(content) <= LIMITS.disk_mb << 20 for content in first.files.values())
    assert b"root:" not in first.files.get("left", b"")
    assert (second.stdout, second.status) == (b"7\n", 0), second
