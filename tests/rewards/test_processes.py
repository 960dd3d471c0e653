"""Reward processes end with their parent, however it ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import asyncio, os, signal, sys
from hone.rewards.rubric import Rubric
from hone.rewards.settings import RewardConfig
from hone.types import Prompt, StopReason, Trajectory, TrajectoryGroup

def group(response):
    prompt = Prompt("p", (1,), (), None, "d")
    one = Trajectory("p", 0, (1, 2), 1, (0, 1), (0.0, 0.0), (-1, 0), response, StopReason.STOP)
    return TrajectoryGroup(prompt, (one,))

async def main():
    rubric = Rubric(RewardConfig(components={"a": {"reward": sys.argv[1]}}, workers=2))
    await rubric.start()
    print(*[process.pid for process in rubric._pool._processes.values()], flush=True)
    await asyncio.gather(*(rubric.score(group(response)) for response in sys.argv[2:]))
    await asyncio.sleep(600)

asyncio.run(main())
"""

KILL = """
    pool = rubric._pool
    children = list(pool._processes.values())
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    while any(child.alive for child in children):
        await asyncio.sleep(0.01)
    scored = await asyncio.gather(*(rubric.score(group("fine")) for _ in range(4)))
    print([one.trajectories[0].error for one in scored])
    await rubric.close()
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks processes up in /proc")
@pytest.mark.parametrize("responses", [["fine"], ["spin", "sleep"]], ids=["idle", "in a call"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_die_with_their_parent(user, responses, how):
    command = [sys.executable, "-c", PARENT, user("temper"), *responses]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        time.sleep(0.3)  # let the calls begin
        parent.send_signal(how)
        parent.wait(20)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def test_the_end_of_a_process_that_had_no_call_fails_no_answer(user):
    code = PARENT.replace("    await asyncio.sleep(600)", KILL)
    done = subprocess.run(
        [sys.executable, "-c", code, user("temper"), "fine"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[1:] == ["['', '', '', '']"], done.stderr


def test_a_worker_that_hone_did_not_start_says_so():
    done = subprocess.run([sys.executable, "-m", "hone.rewards.worker"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "this program is started by hone" in done.stderr


def test_a_worker_loads_nothing_heavy():
    heavy = ("torch", "transformers", "pydantic", "numpy")
    code = f"import sys, hone.rewards.worker; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_a_stray_module_in_the_working_folder_shadows_nothing(tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "mine.py").write_text("def f(response, ground_truth, row):\n    return 0.5\n")
    code = PARENT.replace("await asyncio.sleep(600)", "await rubric.close()")
    command = [sys.executable, "-P", "-c", code, "mine:f", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
