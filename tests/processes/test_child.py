"""Server processes: real ones, with children that hide, ended in every way there is."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from hone.processes.child import ServerFailed, ServerProcess
from hone.processes.supervisor import descendants

# A server with three more processes: a child, a child in a session of its own, and an orphan whose parent has ended.
TREE = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
double = f"import subprocess; print(subprocess.Popen({sleep!r}, start_new_session=True, stdout=-3, stderr=-3).pid)"
orphan = int(subprocess.run([sys.executable, "-c", double], capture_output=True, text=True).stdout)
open(sys.argv[1], "w").write(" ".join(map(str, [os.getpid(), *(c.pid for c in children), orphan])))
os.rename(sys.argv[1], sys.argv[1] + ".ready")
print("serving", flush=True)
time.sleep(600)
"""


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if running(pid)] == []


class Tree:
    """A `TREE` under a `ServerProcess`."""

    def __init__(self, folder):
        self.marker = folder / "pids"
        self.ready_file = folder / "pids.ready"
        self.process = ServerProcess(
            "tree", [sys.executable, "-c", TREE, str(self.marker)], {}, folder / "logs" / "tree.log"
        )

    async def ready(self):
        return self.ready_file.exists()

    @property
    def pids(self):
        return [int(pid) for pid in self.ready_file.read_text().split()]


@pytest.fixture
def tree(tmp_path):
    made = Tree(tmp_path)
    yield made
    asyncio.run(made.process.stop(0))


def python(code, tmp_path, **environment):
    return ServerProcess("s-0", [sys.executable, "-c", code], environment, tmp_path / "s-0.log")


async def never():
    return False


async def always():
    return True


def test_stop_ends_the_whole_tree(tree, finish):
    finish(tree.process.start(tree.ready, 30))
    pids = tree.pids
    assert tree.process.alive
    assert set(tree.process.process_ids()) >= set(pids)
    assert all(map(running, pids))
    finish(tree.process.stop(5))
    assert not tree.process.alive
    assert not any(map(running, pids))
    assert tree.process.ended == "signal SIGTERM"
    finish(tree.process.stop(5))  # nothing more to do


def test_a_crash_ends_the_whole_tree_and_is_noticed(tree, finish):
    finish(tree.process.start(tree.ready, 30))
    pids = tree.pids
    os.kill(pids[0], signal.SIGKILL)
    finish(asyncio.wait_for(tree.process.wait_dead(), 10))
    assert not any(map(running, pids))
    assert tree.process.ended == "signal SIGKILL"


def test_a_supervisor_whose_stand_in_is_killed_ends_the_whole_tree(tree, finish):
    """As Ray kills the children of a process that it ends, and hone lives or not."""
    finish(tree.process.start(tree.ready, 30))
    pids = tree.pids
    os.kill(tree.process._tree.pid, signal.SIGKILL)
    assert gone(pids)
    finish(tree.process.stop(1))
    assert tree.process.ended == "signal SIGKILL"


def test_the_supervisors_death_ends_the_server_and_stop_the_rest(tree, finish):
    finish(tree.process.start(tree.ready, 30))
    pids = tree.pids
    os.kill(descendants(tree.process._tree.pid)[0], signal.SIGKILL)
    finish(asyncio.wait_for(tree.process.wait_dead(), 10))
    assert gone(pids[:1])
    finish(tree.process.stop(1))
    assert not any(map(running, pids[:2]))
    for pid in pids[2:]:  # a session of its own and no supervisor: nothing but the test can find these
        os.kill(pid, signal.SIGKILL)


HONE = """
import asyncio, sys, time
from pathlib import Path
from hone.processes.child import ServerProcess
folder = Path(sys.argv[1])
server = ServerProcess("tree", [sys.executable, "-c", sys.argv[2], str(folder / "pids")],
    {"HONE_SERVER_FOLDER": str(folder / "private")}, folder / "log")
async def ready(): return (folder / "pids.ready").exists()
asyncio.run(server.start(ready, 30))
if sys.argv[3] == "exit":
    sys.exit(0)
(folder / "started").write_text("")
time.sleep(600)
"""


@pytest.mark.parametrize("death", ["SIGKILL", "SIGINT", "exit"])
def test_no_process_and_no_private_folder_survives_hone(tmp_path, death):
    (tmp_path / "private" / "path").mkdir(parents=True)
    hone = subprocess.Popen(
        [sys.executable, "-c", HONE, str(tmp_path), TREE, death], start_new_session=True, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while hone.poll() is None and not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids.ready").read_text().split()]
    if death != "exit":
        hone.send_signal(signal.Signals[death])
    hone.wait(30)
    assert gone(pids)
    deadline = time.monotonic() + 10
    while (tmp_path / "private").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (tmp_path / "private").exists()


def test_it_starts_again_and_the_log_grows(tree, finish):
    for expected in (1, 2):
        finish(tree.process.start(tree.ready, 30))
        with pytest.raises(RuntimeError, match="server tree is already running"):
            finish(tree.process.start(tree.ready, 30))
        deadline = time.monotonic() + 10
        while tree.process.last_lines() != "serving" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert tree.process.last_lines() == "serving"
        assert tree.process.log.read_text().count("serving") == expected
        finish(tree.process.stop(5))
        tree.ready_file.unlink()


def test_a_server_that_dies_while_it_starts_shows_its_last_lines(tmp_path, finish):
    process = python("print('one'); print('no such model', flush=True); raise SystemExit(3)", tmp_path)
    with pytest.raises(ServerFailed, match=r"s-0 ended with exit status 3(.|\n)*one\nno such model"):
        finish(process.start(never, 30))
    assert not process.alive


def test_a_server_that_is_never_ready_is_ended_at_its_deadline(tmp_path, finish):
    process = python("print('loading', flush=True); import time; time.sleep(600)", tmp_path)
    with pytest.raises(ServerFailed, match=r"s-0 was not ready after 1.5 s(.|\n)*loading"):
        finish(process.start(never, 1.5))
    assert not process.alive


def test_a_command_that_does_not_exist_is_said(tmp_path, finish):
    process = ServerProcess("s-0", [str(tmp_path / "nothing")], {}, tmp_path / "log")
    with pytest.raises(ServerFailed, match="No such file"):
        finish(process.start(never, 30))


def test_a_server_that_ignores_sigterm_is_killed_after_its_time(tmp_path, finish):
    ready_file = tmp_path / "ready"
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(ready_file)!r}, 'w'); time.sleep(600)"
    process = python(code, tmp_path)

    async def ready():
        return ready_file.exists()

    finish(process.start(ready, 30))
    finish(process.stop(0.5))
    assert process.ended == "signal SIGKILL"
    assert "did not end within 0.5 s of SIGTERM" in process.last_lines()


WITHOUT_FIRST_THREAD = """
import ctypes, os, sys, threading, time
def last():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
    open(sys.argv[1], "w").close()
    time.sleep(600)
threading.Thread(target=last).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_server_whose_first_thread_has_ended_is_killed_too(tmp_path, finish):
    """The kernel reports its state as zombie, and it cannot be reaped while its other threads run."""
    alone = tmp_path / "alone"
    command = [sys.executable, "-c", WITHOUT_FIRST_THREAD, str(alone)]
    server = ServerProcess("s-0", command, {}, tmp_path / "s-0.log")

    async def ready():
        return alone.exists()

    finish(server.start(ready, 30))
    (pid,) = server.process_ids()[-1:]
    finish(server.stop(0))
    assert server.ended == "signal SIGKILL"
    assert not os.path.exists(f"/proc/{pid}")


def test_the_environment_is_added_and_stays_out_of_the_log(tmp_path, finish):
    process = python("import os, sys; sys.exit(os.environ['HONE_TOKEN'] != 'secret')", tmp_path, HONE_TOKEN="secret")
    with pytest.raises(ServerFailed, match="exit status 0") as caught:
        finish(process.start(never, 30))
    assert "secret" not in str(caught.value) + process.log.read_text()
