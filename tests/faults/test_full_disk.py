"""A disk that stays full ends a run with an error that says so, and the run continues as if it had not been."""

import errno
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hone
from hone import full_disk
from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.tracking.base import TrackingError
from hone.trainers.run.checkpoints import RunCheckpointError
from hone.weights.base import WeightSyncError
from hone.weights.transports.ipc.memory import SharedBuffers
from tests.ranks import run_ranks
from tests.trainers.test_resume import assert_same_run
from tests.trainers.tiny import recipe

FULL = r"No space left on device|no room for a checkpoint"


@pytest.fixture
def disk(tmp_path):
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=60)
    if mounted.returncode:
        pytest.skip(f"no file system of 16 MiB can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


def fill(file, spare):
    """Write zeros until nothing fits any more, then free `spare` bytes."""
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            out.truncate(max(0, out.tell() - spare))


def test_a_full_disk_is_waited_for_by_the_clock(monkeypatch):
    """A write of gigabytes takes a while until it fails, so that attempts do not count."""
    monkeypatch.setattr(full_disk, "PATIENCE_S", 0.05)
    monkeypatch.setattr(full_disk, "PAUSE_S", 0.0005)
    began, attempts = time.monotonic(), []

    def write():
        attempts.append(time.monotonic() - began)
        time.sleep(0.02)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        full_disk.until_room(write)
    assert 1 < len(attempts) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 64 * 1024], ids=["nothing", "metrics"])
def test_a_run_whose_disk_was_full_continues_to_the_same_bits(disk, tmp_path, spare, monkeypatch):
    """`spare` bytes fit: nothing more, or the metrics of a few steps but no checkpoint."""
    monkeypatch.setattr(full_disk, "PATIENCE_S", 0.5)
    whole, broken = recipe(tmp_path / "whole"), recipe(disk / "broken")
    hone.train(whole)

    def full_after_the_third(step, _):
        if step == 3:
            fill(disk / "zeros", spare)

    with pytest.raises((TrackingError, RunCheckpointError), match=FULL):
        hone.train(broken, on_step=full_after_the_third)
    (disk / "zeros").unlink()
    hone.train(broken)
    assert_same_run(tmp_path / "whole" / "run", disk / "broken" / "run")


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_moment_costs_nothing(disk, tmp_path):
    whole, waiting = recipe(tmp_path / "whole"), recipe(disk / "waiting")
    hone.train(whole)
    timers = []

    def full_after_the_third(step, _):
        if step == 3:
            fill(disk / "zeros", 0)
            timers.append(threading.Timer(0.6, (disk / "zeros").unlink))
            timers[0].start()

    hone.train(waiting, on_step=full_after_the_third)
    timers[0].join()
    assert_same_run(tmp_path / "whole" / "run", disk / "waiting" / "run")


SFT = """
kind: sft
run: {{dir: {folder}/run, steps: 4, seed: 0}}
model:
  build: {{hidden_size: 32, layers: 1, heads: 4, kv_heads: 2, mlp_size: 48, max_positions: 64, characters: abcdefghij}}
data: {{train: {{source: {{name: python, function: "{folder}/task.py:rows", size: 64, seed: 1}}}}}}
samples_per_step: 6
actor: {{compute_dtype: float32, max_tokens_per_microbatch: 64, optimizer: {{lr: 3.0e-3}}}}
checkpoint: {{every_steps: 2, keep: 9}}
tracking: {{trackers: [jsonl]}}
runtime: {{threads: 1, collective_timeout_s: 60}}
"""


def spread_run(folder, zeros, full_s, patience_s=120.0):
    """Train on this rank; the first one fills the disk for `full_s` after step 1, when the metrics are written."""
    full_disk.PATIENCE_S = patience_s  # in this process, which ends afterwards
    timer = threading.Timer(full_s, lambda: Path(zeros).unlink())
    timer.daemon = True

    def full_after_the_first(step, _):
        if step == 1 and ranks.is_first() and full_s:
            fill(Path(zeros), 256 * 1024)
            timer.start()

    try:
        hone.sft(Path(folder) / "run.yaml", on_step=full_after_the_first)
    except (RunCheckpointError, RankLost) as error:
        return {"alone": True, "error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


@pytest.mark.slow
def test_with_two_ranks_a_full_disk_is_waited_for_as_with_one(disk, tmp_path, capfd):
    def laid_out(folder):
        folder.mkdir(exist_ok=True)
        (folder / "task.py").write_text(
            "def rows(size, seed):\n    for n in range(size):\n        word = 'abcdefghij'[n % 9 :]\n"
            "        yield {'messages': [{'role': 'user', 'content': word}, {'role': 'assistant', 'content': word}]}\n"
        )
        (folder / "run.yaml").write_text(SFT.format(folder=folder))
        return str(folder)

    zeros = str(disk / "zeros")
    whole, waiting, lasting = (laid_out(one) for one in (tmp_path / "whole", disk / "waiting", disk / "lasting"))
    assert run_ranks(2, spread_run, whole, zeros, 0.0) == [{"error": ""}] * 2
    capfd.readouterr()
    assert run_ranks(2, spread_run, waiting, zeros, 0.6) == [{"error": ""}] * 2
    assert "hone tries again for 120 s" in capfd.readouterr().err
    found = run_ranks(2, spread_run, lasting, zeros, 600.0, 0.5)
    assert any("DiskFull: cannot write the checkpoint of step" in one["error"] for one in found), found
    assert all(one["error"].startswith(("DiskFull", "RankLost")) for one in found)
    Path(zeros).unlink()
    assert run_ranks(2, spread_run, lasting, zeros, 0.0) == [{"error": ""}] * 2
    for other in (waiting, lasting):
        a, b = (load_file(Path(one) / "run" / "export" / "model.safetensors") for one in (whole, other))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_bucket_of_weights_that_finds_no_memory_is_an_error_before_it_is_written(disk, monkeypatch):
    """Buckets are files of a small disk here, as on systems without `memfd_create`. Writing would be a bus error."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    buffers = SharedBuffers(64 << 20)
    buffers.allocate(0, 8 << 20)
    buffers.tensors[0][: 8 << 20].fill_(7)
    with pytest.raises(WeightSyncError, match=r"No space left on device.* weights\.bucket_mib"):
        buffers.allocate(1, 64 << 20)
    buffers.allocate(0, 9 << 20)
    buffers.close()
