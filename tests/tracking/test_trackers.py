"""Trackers of other libraries, for real and offline: a run writes, is resumed, and its numbers are read back.

Each runs in a process of its own, as in a training run: these libraries keep threads, services and global state.
"""

import json
import math
import os
import struct
import subprocess
import sys

import pytest

RUN = """
import sys
from contextlib import suppress
from pathlib import Path
from hone.config import build
from hone.tracking.base import RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.settings import TrackingConfig

folder, choice, stops = Path(sys.argv[1]), eval(sys.argv[2]), [int(step) for step in sys.argv[3:]]
choice = {**(choice if isinstance(choice, dict) else {"name": choice}), "timeout_s": 60}
choice |= {"completions": 2, "completions_every_steps": 5}
config = build(TrackingConfig, {"trackers": ["jsonl", choice]}, source="test")
at = 0
info = RunInfo(folder, config={"run": {"seed": 3}, "lists": [1, 2]})
for stop in stops:  # each stop is a launch that continues from the step before its own last one; all but one fail
    with suppress(ConnectionError), Tracking(config, info) as hub:
        hub.begin(at)
        for step in range(at + 1 if at else 0, stop + 1):
            tracker = next(one for name, one in hub._trackers.items() if name != "jsonl")
            for held_out in (None, "sort") if step % 3 == 0 else (None,):
                row = {"set": held_out, "question": "a|b", "prompt": "", "status": "ok"}
                answers = [{"response": f"{step}\\n{i}", "reward": None if i else 0.5} for i in range(4)]
                tracker.rollouts(step, [{**row, **answer} for answer in answers])
            hub.log(step, {"reward/mean": step / 8, "eval/sort/mean@4": 0.5, "train/kl": float("nan")})
        print(hub.places())
        LOOK
        if stop != stops[-1]:
            raise ConnectionError
    LOOK
    at = stop - 1
"""


def launch(folder, choice, *stops, look="pass", then="", **environment):
    """Runs the launches, `look` in and after each, then `then`; returns what was printed.

    No tracker may be switched off.
    """
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("LOOK", look) + then, str(folder), repr(choice), *map(str, stops)],
        capture_output=True, text=True, timeout=120, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr
    return done.stdout


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = launch(tmp_path / "run", "tensorboard", 4, 6)
    assert str(tmp_path / "run" / "tensorboard") in out
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean", "eval/sort/mean@4", "train/kl"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(step, step / 8) for step in range(7)]
    assert math.isnan(events.Scalars("train/kl")[0].value)
    texts = {tag: [one.step for one in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    assert texts == {"completions/train": [0, 5], "completions/sort": [0, 3, 6]}
    (shown, _) = (one.tensor_proto.string_val[0].decode() for one in events.Tensors("completions/train"))
    assert shown.splitlines()[0] == "| prompt | response | reward | status |"
    assert shown.splitlines()[2:] == ["| a\\|b | 0<br>0 | 0.5 | ok |", "| a\\|b | 0<br>1 |  | ok |"]


def wandb_records(path):
    """The records of an offline run's file: LevelDB's log format around protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    raw, position, buffer = path.read_bytes(), 7, b""
    while position + 7 <= len(raw):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack("<IHB", raw[position : position + 7])
        buffer += raw[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(buffer)
            yield record
            buffer = b""


def test_wandb(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    folder = tmp_path / "run"
    offline = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_CACHE_DIR": str(tmp_path / "cache"),
               "WANDB_CONFIG_DIR": str(tmp_path / "config"), "WANDB_DATA_DIR": str(tmp_path / "data")}  # fmt: skip
    launch(folder, {"name": "wandb", "project": "sorting"}, 4, 6, **offline)
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    mark = (folder / "tracking" / "wandb.id").read_text().strip()
    logged, tables, codes = [], [], []
    for path in files:
        records = list(wandb_records(path))
        (run,) = [record.run for record in records if record.HasField("run")]
        assert (run.run_id, run.project, run.display_name) == (mark, "sorting", "run")
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert settings["run"] == {"seed": 3}
        codes += [record.exit.exit_code for record in records if record.HasField("exit")]
        for record in records:
            if record.HasField("history"):
                items = {item.nested_key[0] or item.key: item.value_json for item in record.history.item}
                logged.append((int(items["_step"]), json.loads(items["reward/mean"]), items["train/kl"]))
                step = int(items["_step"])
                counts = [item for item in record.history.item if item.nested_key[1:] == ["nrows"]]
                tables += [(step, item.nested_key[0], int(item.value_json)) for item in counts]
    assert logged == [(step, step / 8, "NaN") for step in (0, 1, 2, 3, 4, 4, 5, 6)]
    train, held_out = (
        [(step, rows) for step, key, rows in tables if key == f"completions/{of}"] for of in ("train", "sort")
    )
    assert train == [(0, 2), (5, 2)]
    assert held_out == [(0, 2), (3, 2), (6, 2)]
    assert codes == [1, 0]


def test_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    choice = {"name": "mlflow", "uri": f"file://{tmp_path / 'store'}", "experiment": "sorting"}
    read = """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient(choice["uri"])
(run,) = client.search_runs([client.get_experiment_by_name("sorting").experiment_id])
points = lambda name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
history = {name: points(name) for name in run.data.metrics}
print(json.dumps([run.info.run_name, run.info.status, run.data.params, history]))
"""
    own = "(folder / 'tracking' / 'mlflow.id').read_text().strip()"
    look = f"import mlflow; print('is', mlflow.MlflowClient(choice['uri']).get_run({own}).info.status)"
    out = launch(tmp_path / "run", choice, 4, 6, look=look, then=read, MLFLOW_ALLOW_FILE_STORE="true")
    name, status, params, history = json.loads(out.splitlines()[-1])
    assert (name, status) == ("run", "FINISHED")
    statuses = [line.removeprefix("is ") for line in out.splitlines() if line.startswith("is ")]
    assert statuses == ["RUNNING", "FAILED", "RUNNING", "FINISHED"]
    assert params == {"run.seed": "3", "lists": "[1, 2]"}
    assert sorted(map(tuple, history["reward/mean"])) == [(step, step / 8) for step in (0, 1, 2, 3, 4, 4, 5, 6)]
    assert {value for _, value in history["eval/sort/mean_4"]} == {0.5}
    assert len(history["train/kl"]) == 8
    files = sorted((tmp_path / "store").rglob("completions/*/*.json"))
    assert [f"{file.parent.name}/{file.stem}" for file in files] == [
        *(f"sort/step_0000000{step}" for step in (0, 3, 6)),
        *(f"train/step_0000000{step}" for step in (0, 5)),
    ]
    assert json.loads(files[0].read_text()) == {
        "columns": ["prompt", "response", "reward", "status"],
        "data": [["a|b", "0\n0", 0.5, "ok"], ["a|b", "0\n1", None, "ok"]],
    }


NAMES = {  # hone's name -> MLflow's, in alphabetical order
    "reward/s": "reward/s",
    "reward/s/ratio (1e-3)": "reward/s.ratio _1e-3_",
    "reward/s/ratio/deep": "reward/s.ratio/deep",
    "eval/../x": "eval/_../x",
    "eval//y": "eval/y",
    "rollout/c@1": "rollout/c_1",
    "rollout/c_1": "rollout/c_1_2",
    "train/größe": "train/gr__e",
}


def test_mlflow_gets_every_metric_whatever_its_name_and_needs_no_database(tmp_path):
    """With mlflow-skinny and no address, a store of files, where a name is a path; a later launch keeps the names."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    many = {f"train/{number}": 0.0 for number in range(1001)}  # MLflow takes 1,000 in a call
    script = f"""
import json
from pathlib import Path
from hone.tracking.base import RunInfo
from hone.tracking.settings import MlflowSettings
from hone.tracking.trackers.mlflow import MlflowClient, MlflowTracker
names = {list(NAMES)!r}
long = "train/" + "n" * 300
for resumed, step in ((None, 0), (0, 1)):
    tracker = MlflowTracker(MlflowSettings(), RunInfo(Path("run"), resumed_from=resumed, config={{"a": 1, "a/b": 2}}))
    if resumed is None:
        tracker.log(0, {{"eval/late/x": 1.0}})
    tracker.log(step, {{name: float(number) for number, name in enumerate(names)}} | {{long: 7.0, "eval/late": 8.0}})
    tracker.log(step, {many!r})
    tracker.close()
(run,) = tracker._client.search_runs([tracker._experiment("hone")])
points = lambda name: [(one.step, one.value) for one in tracker._client.get_metric_history(run.info.run_id, name)]
print(json.dumps([run.data.params, {{name: points(name) for name in run.data.metrics if name[6:].isdigit() is False}}]))
assert len([name for name in run.data.metrics if name[6:].isdigit()]) == 1001
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    params, found = json.loads(done.stdout.splitlines()[-1])
    assert params == {"a": "1", "a.b": "2"}
    expected = {NAMES[name]: [[0, number], [1, number]] for number, name in enumerate(NAMES)}
    assert {name: found.get(name) for name in expected} == expected
    assert found["eval/late_"] == [[0, 8.0], [1, 8.0]]  # `eval/late` is a folder since the first step
    (long,) = [name for name in found if len(name) > 100]
    assert found[long] == [[0, 7.0], [1, 7.0]]
    assert (tmp_path / "mlruns").is_dir()


def test_trackio(tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed")
    env = {"TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    read = """
import json
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("sorting")
rows = SQLiteStorage.get_logs("sorting", name)
tables = {key: [row["step"] for row in rows if key in row] for row in rows for key in row if "completions/" in key}
found = [[row["step"], row["reward/mean"]] for row in rows if "reward/mean" in row]
print(json.dumps([name, found, tables]))
"""
    out = launch(tmp_path / "run", {"name": "trackio", "project": "sorting"}, 4, 6, then=read, **env)
    name, rows, tables = json.loads(out.splitlines()[-1])
    assert name.startswith("run-")
    assert tables == {"completions/train": [0, 5], "completions/sort": [0, 3, 6]}
    assert sorted(map(tuple, rows)) == [(step, step / 8) for step in (0, 1, 2, 3, 4, 4, 5, 6)]
