"""`hone train --sweep`: runs for all combinations, one table and one chart; and runs that their score ends."""

import json
import re
import signal

import pytest

import hone
from hone.cli.main import main
from hone.cli.sweep import SweptRun, _combinations
from hone.composition import ConfigError
from hone.trainers.run.context import Stopping
from tests.trainers.tiny import metrics, recipe


@pytest.mark.slow
def test_two_values_are_two_runs_in_one_table_and_one_chart(tmp_path, capsys):
    run_file, handler = str(recipe(tmp_path, {"run": {"steps": 1}})), signal.getsignal(signal.SIGTERM)
    assert main(["train", run_file, "--sweep", "actor.optimizer.lr=1e-3,0.1", "--at-once", "2"]) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    out, err = capsys.readouterr()
    folder = tmp_path / "run-sweep"
    last = {}
    for name in ("actor.optimizer.lr=1e-3", "actor.optimizer.lr=0.1"):
        _, line = metrics(folder / name)
        last[name] = f"{line['eval/held_out/reward']:.4f}"
        assert f"done: {name}" in err
        assert re.search(rf"│ {name.rpartition('=')[2]} +│ eval/held_out/reward │ {last[name]} ", out)
    page = (folder / "sweep.html").read_text()
    assert page.count("<polyline") == 2
    assert all(f"<td>{value}</td>" in page for value in last.values())
    assert f"chart: {folder}/sweep.html" in out


def test_a_wrong_value_is_found_before_the_first_run(tmp_path, capsys):
    run_file = str(recipe(tmp_path))
    assert main(["train", run_file, "--sweep", "run.seed=1,two"]) == 2
    assert "run.seed" in capsys.readouterr().err
    assert not (tmp_path / "run-sweep").exists()
    assert main(["train", run_file, "--sweep", "run.seed=1,1"]) == 2
    assert "would share the folder" in capsys.readouterr().err
    assert main(["train", run_file, "--sweep", "run.seed=1,2", "--at-once", "2", "runtime.backend=ray"]) == 2
    assert "all would use the same devices; run `ray start --head` first" in capsys.readouterr().err
    assert main(["train", "--model", "m", "--sweep", "run.seed=1,2"]) == 2
    assert "--sweep takes a run file and settings only: hone train RUN.yaml --sweep" in capsys.readouterr().err


def test_combinations_and_their_names():
    found = list(_combinations(["run.seed=0,1", "run.x=[1,2],{a: 3}"]))
    assert [SweptRun(values, None).name for values in found] == [
        "run.seed=0,run.x=_1_2_", "run.seed=0,run.x=_a_3_", "run.seed=1,run.x=_1_2_", "run.seed=1,run.x=_a_3_",
    ]  # fmt: skip
    assert found[1] == (("run.seed", "0"), ("run.x", "{a: 3}"))
    (nested, quoted) = _combinations(["a.b=[[1,2],[3]],'x,y'"])
    assert (nested, quoted) == ((("a.b", "[[1,2],[3]]"),), (("a.b", "'x,y'"),))
    for wrong in ("run.seed=1", "run.seed=1,,2", "run.seed"):
        with pytest.raises(ConfigError, match="should be key=a,b,c with two values or more"):
            _combinations([wrong])
    with pytest.raises(ConfigError, match=r"run\.dir: each run gets a folder of its own"):
        _combinations(["run.dir=a,b"])
    with pytest.raises(ConfigError, match="names a key twice"):
        _combinations(["run.seed=1,2", "run.seed=3,4"])


def test_a_score_that_is_reached_or_gets_no_better_ends_a_run():
    reached = Stopping(reaches=0.5)
    for score, ends in ((0.4, False), (0.5, True)):
        reached.see(score)
        assert bool(reached.reason) == ends
    patient = Stopping(patience=2)
    for score, ends in ((0.1, False), (0.3, False), (0.3, False), (0.2, True)):
        patient.see(score)
        assert bool(patient.reason) == ends
    again = Stopping(patience=2)
    again.restore(json.loads(json.dumps(patient.state)))
    assert again.reason == patient.reason
    other = Stopping(patience=3)
    other.restore(patient.state)
    assert (other.reason, other.best) == ("", 0.3)


def test_a_run_ends_early_is_whole_and_stays_ended(tmp_path, capsys):
    rule = {"steps": 6, "stop_when": {"no_better_for": 1}}
    keys = str(recipe(tmp_path, {"run": rule})), "evaluation.every_steps=1", "evaluation.score=eval/held_out/failed"
    result = hone.train(*keys)
    assert "| steps | 1 |" in (result.model / "README.md").read_text()
    assert [line["step"] for line in result.metrics] == [0, 1]  # the number of failures never grows
    assert (result.model / "model.safetensors").is_file()
    assert "the run ends after step 1 of 6: 1 evaluations brought no better score than 0" in capsys.readouterr().err
    before = (result.folder / "metrics.jsonl").read_text()
    hone.train(*keys)
    assert (result.folder / "metrics.jsonl").read_text() == before


def test_a_rule_that_could_never_end_a_run_is_refused(tmp_path, capsys):
    run_file = str(recipe(tmp_path, {"run": {"stop_when": {"score_reaches": 1}}}))
    assert main(["train", run_file, "evaluation.every_steps=0"]) == 2
    assert "set evaluation.sets and evaluation.every_steps" in capsys.readouterr().err
