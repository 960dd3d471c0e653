"""Ray waits 30 s for its own processes, and a busy machine takes longer to start them: hone tries again."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import logging, os, signal, sys, threading, time
from pathlib import Path
import ray
from hone.config import ConfigError
from hone.runtime.ray_cluster import connect
from hone.runtime.settings import RaySettings

logging.basicConfig(format="%(message)s")

def raylets():
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            words = (one / "stat").read_text().split()
        except OSError:
            continue
        if words[1] == "(raylet)" and words[2] != "Z" and int(words[3]) == os.getpid():
            found.append(int(one.name))
    return found

def stop(starts):
    stopped = set()
    while len(stopped) < starts:
        for one in set(raylets()) - stopped:
            os.kill(one, signal.SIGSTOP)
            stopped.add(one)
        time.sleep(0.01)

threading.Thread(target=stop, args=(int(sys.argv[1]),), daemon=True).start()
try:
    connect(RaySettings(start_timeout_s=float(sys.argv[2])))
    print("started", len(raylets()), ray.get(ray.remote(lambda: 7).remote(), timeout=60))
except ConfigError as error:
    print("refused", len(raylets()), error)
"""


def run_where_raylets_stop(starts, timeout_s):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(starts), str(timeout_s)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )


def test_a_cluster_that_does_not_start_in_time_is_started_again_and_leaves_no_process():
    done = run_where_raylets_stop(1, 120)
    assert done.stdout.splitlines()[-1] == "started 1 7", done.stderr[-2000:]
    assert "another attempt: The current node timed out during startup" in done.stderr


def test_the_attempts_end_with_the_reason_after_start_timeout_s():
    done = run_where_raylets_stop(9, 1)
    assert "refused 0 " in done.stdout, done.stderr[-2000:]
    assert "start_timeout_s=1: Ray did not start here in 1 attempt(s)" in done.stdout
    assert "timed out during startup" in done.stdout
