"""The training loop: which checkpoint is the best one, and when a run that cannot learn is ended."""

import errno
import json
import math
import os
import signal

import pytest
import torch

from hone.config import ConfigError
from hone.runtime.settings import PoolSettings, RaySettings, RuntimeConfig
from hone.tracking.base import Interrupted, RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.metrics import Timer
from hone.tracking.settings import TrackingConfig
from hone.trainers.run.checkpoints import CheckpointStore, DiskFull
from hone.trainers.run.context import RunContext
from hone.trainers.run.loop import Trainer
from hone.trainers.run.profiler import Profiler
from hone.trainers.run.recorder import NotFinite, Recorder
from hone.trainers.run.settings import CheckpointConfig, ProfileConfig
from hone.types import Metric


class Counting(Trainer):
    """Its weights are the number of the step; scores say which steps are evaluated."""

    def __init__(self, folder, scores, traced=(), **checkpoint):
        tracking = Tracking(TrackingConfig(trackers=()), RunInfo(run_dir=folder), lambda ids: "")
        profiler = Profiler(ProfileConfig(steps=traced) if traced else None, 7, RuntimeConfig(), folder, tracking)
        context = RunContext(folder, tracking, Recorder(Timer()), profiler)
        super().__init__(7, CheckpointConfig(**checkpoint), context, evaluates=True)
        self.scores = scores
        self.weights = self.updates = 0

    def changing_roles(self):
        return [self]

    def step(self, step):
        self.updates += 1
        self.weights = int(torch.eye(step).trace())

    def evaluate(self, step):
        return {"eval/set/right": self.scores[step]} if step in self.scores else {}

    def score_of(self, figures):
        return figures.get("eval/set/right")

    def parts(self):
        return {"actor": lambda folder: (folder / "weights.txt").write_text(str(self.weights))}

    def state(self):
        return {"weights": self.weights}

    def restore(self, checkpoint):
        self.weights = int((checkpoint.part("actor") / "weights.txt").read_text())

    def export(self, folder):
        folder.mkdir()
        (folder / "weights.txt").write_text(str(self.weights))


def saved(folder):
    store = CheckpointStore(folder / "checkpoints", keep=1)
    return {found.name: store.read(found).score for found in sorted((folder / "checkpoints").iterdir())}, store


def test_a_stop_in_the_last_step_still_finishes_the_run(tmp_path, capsys):
    ends = []

    class Stopped(Counting):
        def step(self, step):
            super().step(step)
            if step == self.steps:
                os.kill(os.getpid(), signal.SIGTERM)

        def export(self, folder):
            super().export(folder)
            ends.append(self.weights)
            os.kill(os.getpid(), signal.SIGINT if len(ends) > 1 else 0)  # a second one during the export ends it

    Stopped(tmp_path, {}, every_steps=100).run()
    assert ends == [7]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.yaml").touch()
    with pytest.raises(KeyboardInterrupt):
        Stopped(tmp_path / "again", {}, every_steps=100).run()
    assert list(saved(tmp_path / "again")[0]) == ["step_00000000", "step_00000007"]
    shown = capsys.readouterr().err
    assert f"hone export {tmp_path / 'again'} FOLDER" in shown


def test_an_export_is_whole_or_the_earlier_one(tmp_path, capsys):
    class Broken(Counting):
        def complete(self, folder):
            (folder / "README.md").write_text("the model card")
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(errno.EROFS, "Read-only file system", str(folder))

    Counting(tmp_path, {}).run()
    again = Broken(tmp_path, {})
    again.complete_export = again.complete
    with pytest.raises(OSError, match="Read-only"):
        again.run()
    assert [one.name for one in (tmp_path / "export").iterdir()] == ["weights.txt"]
    assert not list(tmp_path.glob(".export*"))
    shown = capsys.readouterr().err
    assert "stopping: the model is exported first" in shown
    assert f"{tmp_path / 'export'} was not written. The model is in the checkpoint of step 7" in shown
    assert "run the same command again to export it\n" in shown, "as a warm start it is no folder of a run"


def test_a_stop_before_the_last_step_is_an_interrupted_run(tmp_path):
    trainer = Counting(tmp_path, {}, every_steps=100, keep=9)
    trainer.watchers.append(lambda values: os.kill(os.getpid(), signal.SIGTERM if trainer.weights == 6 else 0))
    with pytest.raises(Interrupted, match="after step 6"):
        trainer.run()
    assert list(saved(tmp_path)[0]) == ["step_00000000", "step_00000006"]


def test_a_score_belongs_to_the_step_that_was_evaluated(tmp_path):
    # Step 3 is the best, and is no multiple of 2; without a checkpoint of its own, its score went to step 4.
    Counting(tmp_path, {0: 0.1, 3: 0.9, 6: 0.5}, every_steps=2, keep=2).run()
    scores, store = saved(tmp_path)
    assert scores == {"step_00000003": 0.9, "step_00000006": 0.5, "step_00000007": None}
    assert (store.best() / "actor" / "weights.txt").read_text() == "3"


def test_an_evaluation_without_a_finite_score_does_not_stand_in_the_way_of_the_best(tmp_path):
    Counting(tmp_path, {0: math.nan, 3: 0.5, 5: math.nan}, every_steps=100, keep=1).run()
    scores, store = saved(tmp_path)
    assert scores == {"step_00000003": 0.5, "step_00000007": None}
    assert store.best().name == "step_00000003"


def test_a_disk_that_stays_full_ends_the_run_resumably(tmp_path):
    class OnASmallDisk(Counting):
        full = True
        tries = 0

        def parts(self):
            def write(folder):
                if self.weights == 6 and self.full:
                    self.tries += 1
                    raise OSError(errno.ENOSPC, "No space left on device")
                (folder / "weights.txt").write_text(str(self.weights))

            return {"actor": write}

    trainer = OnASmallDisk(tmp_path, {}, every_steps=3, keep=9)
    with pytest.raises(DiskFull, match=r"the checkpoint of step 6 .* earlier ones stand: make room, and run the same"):
        trainer.run()
    assert trainer.tries == 1, "parts wait by themselves, so a second wait would only delay the end"
    assert list(saved(tmp_path)[0]) == ["step_00000000", "step_00000003"]
    again = OnASmallDisk(tmp_path, {}, every_steps=9, keep=9)
    again.full = False
    again.run()
    assert list(saved(tmp_path)[0]) == ["step_00000000", "step_00000003", "step_00000007"]


def test_a_run_that_is_continued_knows_its_best_score(tmp_path):
    first = Counting(tmp_path, {0: 0.1, 3: 0.9}, every_steps=2, keep=2)
    first.steps = 4
    first.run()
    Counting(tmp_path, {5: 0.8}, every_steps=100, keep=2).run()
    scores, store = saved(tmp_path)
    assert store.best().name == "step_00000003"
    assert "step_00000005" not in scores, "0.8 is less than 0.9"


def test_without_keep_best_an_evaluation_saves_nothing(tmp_path):
    Counting(tmp_path, {3: 0.9}, every_steps=5, keep=9, keep_best=False).run()
    assert list(saved(tmp_path)[0]) == ["step_00000000", "step_00000005", "step_00000007"]


def skipped(count=1.0, **others):
    return {"train/skipped_steps": Metric.sum(count), **{name: Metric.mean(value) for name, value in others.items()}}


def test_skipped_steps_in_a_row_end_a_run_and_say_what_was_not_finite():
    recorder = Recorder(Timer(), max_skipped_steps=3)
    for _ in range(2):
        recorder.record(skipped())
        recorder.record({"critic/skipped_steps": Metric.sum(1.0)})
    recorder.record(skipped(0.0))  # a step that was taken: the count begins anew
    for _ in range(2):
        recorder.record(skipped())
    with pytest.raises(
        NotFinite, match=r"3 optimizer steps in a row .*run.stop_when.skipped_steps = 3.*policy_loss = nan"
    ):
        recorder.record(skipped(policy_loss=math.nan, lr=0.1))


def test_a_run_without_a_limit_goes_on():
    recorder = Recorder(Timer())
    for _ in range(99):
        recorder.record(skipped())


# -------------------------------------------------------------------------------------------------------------- traces


def test_a_trace_holds_the_operators_of_its_step_and_other_steps_have_none(tmp_path, capfd):
    Counting(tmp_path, {}, traced=(2, 5)).run()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["step-2.json", "step-5.json"]
    events = json.loads((tmp_path / "profile" / "step-2.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    assert names.count("aten::trace") == 1  # of step 2 alone
    assert f"trace of step 2: {tmp_path}/profile/step-2.json" in capfd.readouterr().err


def test_one_step_may_be_a_number_and_a_step_the_run_lacks_is_refused(tmp_path):
    assert ProfileConfig(steps=3).steps == (3,)
    with pytest.raises(ConfigError, match=r"steps: the run has no step 8; choose from 1 to 7 \(run.steps\)"):
        Counting(tmp_path, {}, traced=(2, 8))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        ProfileConfig(steps=(0,))


def test_ranks_to_trace_are_a_number_or_a_list_by_default_all_and_the_run_has_them(tmp_path):
    assert ProfileConfig(steps=3).ranks_of(4) == {0, 1, 2, 3}
    assert ProfileConfig(steps=3, ranks=2).ranks_of(4) == {2}
    assert ProfileConfig(steps=3, ranks=[0, 3]).ranks_of(4) == {0, 3}
    with pytest.raises(ValueError, match="ranks: the run has no rank 4; choose from 0 to 3"):
        ProfileConfig(steps=3, ranks=[0, 4]).ranks_of(4)
    with pytest.raises(ConfigError, match="ranks: the run has no rank 1; choose 0"):
        Profiler(ProfileConfig(steps=3, ranks=1), 7, RuntimeConfig(), tmp_path, None)
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        ProfileConfig(steps=3, ranks=-1)
    with pytest.raises(ValueError, match="at least 1 item"):
        ProfileConfig(steps=3, ranks=[])


def test_the_ranks_of_a_run_are_those_of_its_largest_pool_or_of_torchrun(monkeypatch):
    pools = {"judges": PoolSettings(devices=3, nodes=2), "critic": PoolSettings(devices=1)}
    assert RuntimeConfig(backend=RaySettings(devices=4, pools=pools)).most_ranks() == 6
    assert RuntimeConfig(backend=RaySettings(devices=4, nodes=2, pools=pools)).most_ranks() == 8
    assert RuntimeConfig().most_ranks() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert RuntimeConfig().most_ranks() == 4


def test_a_trace_that_cannot_be_written_costs_a_line_and_not_the_run(tmp_path, capfd):
    (tmp_path / "profile" / "step-2.json").mkdir(parents=True)
    run = Counting(tmp_path, {}, traced=(2, 3))
    run.run()
    assert run.weights == 7
    said = capfd.readouterr().err
    assert f"no trace {tmp_path}/profile/step-2.json: IsADirectoryError" in said
    assert f"trace of step 3: {tmp_path}/profile/step-3.json;" in said


def test_a_profiler_of_the_user_is_left_alone(tmp_path, capfd):
    """The second one of a process ends the first, and torch 2.13 crashes when the first one is ended then."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as own:
        Counting(tmp_path, {}, traced=(2,)).run()
    assert "aten::trace" in {event.key for event in own.key_averages()}
    said = capfd.readouterr().err
    assert f"no trace {tmp_path}/profile/step-2.json: another torch.profiler records this process" in said


def test_a_step_that_fails_ends_its_trace_and_writes_none(tmp_path):
    run = Counting(tmp_path, {}, traced=(2, 3))
    run.step = lambda step: 1 / (2 - step)
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert not torch.autograd.profiler._is_profiler_enabled
    assert not (tmp_path / "profile").exists()
    Counting(tmp_path, {}, traced=(3,)).run()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step-3.json"]
