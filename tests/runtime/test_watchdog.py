"""Runs in which nothing moves on: they end in bounded time, and every rank says what it was doing."""

import signal
import subprocess
import sys
import time

import pytest

from hone.deadline import Stalled
from hone.runtime.watchdog import Watchdog, progress


def sleep_in(phase):
    with Watchdog(0.5) as watchdog:
        watchdog.begins(phase)
        time.sleep(60)


def test_a_main_thread_that_sleeps_is_ended_with_its_stack(capfd):
    begun = time.monotonic()
    with pytest.raises(Stalled) as caught:
        sleep_in("backward")
    assert time.monotonic() - begun < 20
    assert "rank 0 of 1 on node" in str(caught.value)
    assert "no progress in phase backward for runtime.stall_timeout_s=0.5" in str(caught.value)
    printed = capfd.readouterr().err
    assert "backward for" in printed
    assert "time.sleep(60)" in printed


def test_progress_keeps_a_run_alive():
    """Three times the timeout, with a sign of life now and then."""
    before = signal.getsignal(signal.SIGUSR1)
    with Watchdog(1.5):
        for _ in range(30):
            time.sleep(0.15)
            progress()
    assert signal.getsignal(signal.SIGUSR1) == before


STUCK = """
import sys, time
sys.path.insert(0, {root!r})
from hone.workers.train import TrainWorker
from hone.cli.main import main
{where}
sys.exit(main(["sft", {run!r}]))
"""
"""A run whose second rank (or only one) hangs in the middle of its second optimizer step."""
ON_ONE_RANK = """
import os
calls = []
original = TrainWorker.train_batch
def hang(self, batch, loss):
    calls.append(1)
    if len(calls) == 2 and os.environ.get("RANK", "1") == "1":
        time.sleep(1000)
    return original(self, batch, loss)
TrainWorker.train_batch = hang
"""


def stuck_run(tmp_path, launch):
    from tests.runtime.test_local import RUN, TASK

    (tmp_path / "task.py").write_text(TASK)
    run = tmp_path / "run.yaml"
    settings = {"dir": tmp_path / "run", "steps": 6, "task": tmp_path / "task.py"}
    text = RUN.format(**settings, letters='" abcdefghij"', parallel="{}")
    run.write_text(text.replace("collective_timeout_s: 60", "collective_timeout_s: 600, stall_timeout_s: 8"))
    program = tmp_path / "program.py"
    program.write_text(STUCK.format(root=str(sys.path[0]), where=ON_ONE_RANK, run=str(run)))
    begun = time.monotonic()
    done = subprocess.run([sys.executable, *launch, program], capture_output=True, text=True, timeout=280)
    assert done.returncode != 0
    assert time.monotonic() - begun < 250
    return done.stderr


@pytest.mark.slow
def test_a_run_in_one_process_that_hangs_ends(tmp_path):
    printed = stuck_run(tmp_path, [])
    assert "rank 0 of 1 on node" in printed
    assert ": backward for " in printed
    assert "time.sleep(1000)" in printed
    assert "error: the run failed: Stalled: rank 0 of 1" in printed
    assert (tmp_path / "run" / "failure.txt").is_file()


@pytest.mark.slow
def test_ranks_under_torchrun_that_hang_end_and_all_say_where(tmp_path):
    """Rank 1 sleeps; rank 0 waits for it in a collective, where no exception reaches it."""
    printed = stuck_run(tmp_path, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    for rank in (0, 1):
        assert f"rank {rank} of 2 on node" in printed
    assert "time.sleep(1000)" in printed
    assert printed.count(": backward for ") == 2
