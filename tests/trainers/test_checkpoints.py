"""Checkpoints are whole or absent."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple

import pytest

from hone import full_disk
from hone.trainers.run import checkpoints
from hone.trainers.run.checkpoints import CheckpointStore, DiskFull, RunCheckpointError, damage


def writer(text):
    return lambda folder: (folder / "weights.txt").write_text(text)


def test_the_newest_checkpoint_is_read_back_with_its_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    store.prepare()
    assert store.latest() is None
    store.save(1, {"actor": writer("one")}, {"position": 10})
    store.save(2, {"actor": writer("two")}, {"position": 20}, score=0.5)
    found = store.latest()
    assert (found.step, found.state, found.score) == (2, {"position": 20}, 0.5)
    assert (found.part("actor") / "weights.txt").read_text() == "two"


def test_a_part_that_the_run_did_not_have_is_named(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    folder = store.save(1, {"actor": writer("one")}, {})
    found = store.latest()
    assert found.part("actor") == folder / "actor"
    with pytest.raises(RunCheckpointError, match=r"step_00000001 has no reference: .* run\.dir=FOLDER"):
        found.part("reference")


def test_a_checkpoint_of_another_format_names_the_version_that_reads_it(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"actor": writer("one")}, {})
    monkeypatch.setattr(checkpoints, "FORMAT", checkpoints.FORMAT + 1)  # as a later version would have it
    with pytest.raises(RunCheckpointError, match=r"step_00000001 has format 1 of hone 0\.1\.0, and .* reads format 2"):
        store.latest()


def test_the_last_n_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.9), (4, None), (5, 0.3)):
        store.save(step, {"actor": writer(str(step))}, {}, score)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_00000002", "step_00000004", "step_00000005"]
    assert store.best().name == "step_00000002"  # the earliest of equals


def test_a_score_that_is_not_finite_is_never_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=9)
    for step, score in ((1, math.nan), (2, 0.5), (3, math.inf), (4, 0.1)):
        store.save(step, {"actor": writer(str(step))}, {}, score)
    assert store.best().name == "step_00000002"


def test_best_is_not_kept_when_not_asked_for(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=False)
    for step, score in ((1, 0.9), (2, 0.1)):
        store.save(step, {"actor": writer(str(step))}, {}, score)
    assert [f.name for f in tmp_path.iterdir()] == ["step_00000002"]


def test_reading_and_sealing_a_large_checkpoint_is_progress(tmp_path, monkeypatch):
    """They may take longer than a run may stand still."""
    seen, goes_on = [], threading.Event()
    monkeypatch.setattr(checkpoints, "CHUNK", 4)
    monkeypatch.setattr(checkpoints, "WAIT_S", 0.001)
    monkeypatch.setattr(checkpoints, "progress", lambda: (seen.append(threading.current_thread()), goes_on.set()))
    seal = checkpoints._seal
    monkeypatch.setattr(checkpoints, "_seal", lambda partial: (goes_on.wait(60), seal(partial)))
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"actor": writer("0123456789")}, {})
    assert set(seen) == {threading.main_thread()}  # the thread that seals would hide a run that stands still
    seen.clear()
    assert store.latest().step == 1
    assert len(seen) > 10 / 4


@pytest.mark.parametrize("harm", ["truncate", "change", "remove", "no manifest", "torn manifest"])
def test_a_damaged_checkpoint_is_refused_and_says_the_way_out(tmp_path, harm):
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {"actor": writer("first")}, {})
    folder = store.save(2, {"actor": writer("second")}, {})
    victim = folder / "actor" / "weights.txt"
    if harm == "truncate":
        victim.write_text("sec")
    elif harm == "change":
        victim.write_text("sEcond")
    elif harm == "remove":
        victim.unlink()
    elif harm == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text('{"files": {')
    with pytest.raises(RunCheckpointError, match=r"step_00000002 is damaged.*remove it to continue from step_00000001"):
        store.latest()


def test_a_disk_that_fills_up_while_saving_leaves_the_earlier_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {"actor": writer("first")}, {"position": 1})

    def out_of_space(folder):
        (folder / "weights.txt").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunCheckpointError, match=r"step 2.*No space left on device; earlier ones stand"):
        store.save(2, {"actor": out_of_space}, {})
    assert store.latest().step == 1
    assert [f.name for f in tmp_path.iterdir()] == ["step_00000001"]


def test_what_is_written_in_a_thread_is_published_only_when_it_is_there(tmp_path):
    store, on_disk = CheckpointStore(tmp_path, keep=2), []
    store.begin(3, {"actor": writer("begun")}, {"position": 3}, written=lambda wait: wait or bool(on_disk))
    assert store.has_pending
    assert not store.publish(wait=False)
    assert store.latest() is None
    (tmp_path / ".step_00000003.partial" / "actor" / "late.txt").write_text("from a thread")
    on_disk.append(True)
    assert store.publish(wait=True)
    assert not store.has_pending
    found = store.latest()
    assert (found.step, found.state) == (3, {"position": 3})
    assert (found.part("actor") / "late.txt").read_text() == "from a thread"


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.begin(1, {"actor": writer("one")}, {}, written=lambda wait: wait)
    store.begin(2, {"actor": writer("two")}, {}, written=lambda wait: wait)
    assert store.latest().step == 1
    store.publish(wait=True)
    assert store.latest().step == 2


def test_a_thread_that_finds_the_disk_full_leaves_the_earlier_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {"actor": writer("first")}, {})

    def full(wait):
        raise OSError(28, "No space left on device")

    store.begin(2, {"actor": writer("second")}, {}, written=full)
    with pytest.raises(RunCheckpointError, match=r"step 2.*No space left on device; earlier ones stand"):
        store.publish(wait=False)
    assert not store.has_pending
    assert [f.name for f in tmp_path.iterdir()] == ["step_00000001"]


def test_too_little_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {"actor": writer("x" * 1000)}, {})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(full_disk, "PATIENCE_S", 0.0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 10, 500))
    with pytest.raises(DiskFull, match=r"the checkpoint of step 2 .*no room for a checkpoint: .* earlier ones stand"):
        store.save(2, {"actor": writer("y")}, {})
    assert [f.name for f in tmp_path.iterdir()] == ["step_00000001"]


SAVER = """
import sys
from pathlib import Path
from hone.trainers.run.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
store.prepare()
step = 0
while True:
    step += 1
    text = str(step) * 200_000
    store.save(step, {"actor": lambda folder: (folder / "weights.txt").write_text(text)}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_9_during_saves_always_leaves_a_whole_checkpoint(tmp_path):
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            last = int(process.stdout.readline())
        time.sleep(0.0007 * attempt)  # different moments of the fourth save
        os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate(timeout=10)[0].split()
        said = int(rest[-1]) if rest else last
        store = CheckpointStore(folder, keep=2)
        store.prepare()
        found = store.latest()
        assert found.step in (said, said + 1)
        assert found.state == {"step": found.step}
        assert (found.part("actor") / "weights.txt").read_text() == str(found.step) * 200_000
        assert not list(folder.glob(".*"))


def test_the_manifest_covers_every_file(tmp_path):
    folder = CheckpointStore(tmp_path, keep=1).save(1, {"a": writer("x"), "b": writer("y")}, {})
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"a/weights.txt", "b/weights.txt", "state.json"}
    assert damage(folder) == ""
