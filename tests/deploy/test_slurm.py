"""The Slurm scripts, run for real on this machine: stand-ins for `srun` and `scontrol`, two addresses as machines."""

import json
import os
import random
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runtime.test_local import RUN, TASK
from tests.trainers.tiny import recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).parent / "slurm_stand_in"
DEADLINE_S = 500


def free_port():
    """One that nobody is given meanwhile: Ray's workers have those below 20000, the system gives those from 32768."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return str(port)


def sbatch(script, arguments, **environment):
    """Run a script as Slurm does: on the first machine, with the job's variables."""
    job = subprocess.Popen(
        ["bash", ROOT / "deploy" / "slurm" / script, *map(str, arguments)],
        env={
            **os.environ,
            "PATH": f"{STAND_IN}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": "127.0.0.2,127.0.0.3",
            "SLURM_JOB_ID": "7",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = job.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
        raise AssertionError(f"the job did not end within {DEADLINE_S} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def left_over(marker):
    """Processes that still have the marker in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if marker in command:
            found.append(command)
    return found


def test_a_policy_run_on_two_machines(tmp_path):
    port = free_port()
    run = recipe(tmp_path)
    done = sbatch("ray.sbatch", ["train", run, "run.steps=1"], HONE_RAY_PORT=port, HONE_JOIN_S="400")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    written = list((tmp_path / "run" / "checkpoints" / "step_00000001" / "actor").glob("model*"))
    assert len(written) == 2  # a rank on each machine
    assert left_over(f":{port}") == []


def test_a_run_that_fails_ends_the_job_with_its_code(tmp_path):
    port = free_port()
    done = sbatch("ray.sbatch", ["train", recipe(tmp_path), "run.stepps=1"], HONE_RAY_PORT=port, HONE_JOIN_S="400")
    assert done.returncode == 2
    assert "unknown key 'run.stepps'" in done.stderr
    assert left_over(f":{port}") == []


def test_a_supervised_run_on_two_machines(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    path = tmp_path / "run.yaml"
    settings = {"dir": tmp_path / "run", "steps": 2, "task": tmp_path / "task.py"}
    path.write_text(RUN.format(**settings, letters='" abcdefghij"', parallel="{}"))
    done = sbatch("ranks.sbatch", ["sft", path], SLURM_NTASKS_PER_NODE="1", HONE_PORT=free_port())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("report:") == 1  # one rank speaks
    written = list((tmp_path / "run" / "checkpoints" / "step_00000002" / "actor").glob("model*"))
    assert len(written) == 2
