"""A disk that stays full ends a run with an error that says so, and the run continues as if it had not been."""

import os
import subprocess
import tempfile
import threading

import pytest

import hone
from hone import full_disk
from hone.tracking.base import TrackingError
from hone.trainers.run.checkpoints import RunCheckpointError
from hone.weights.base import WeightSyncError
from hone.weights.transports.memory import SharedBuffers
from tests.trainers.test_resume import assert_same_run
from tests.trainers.tiny import recipe

FULL = r"No space left on device|no room for the checkpoint"


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
