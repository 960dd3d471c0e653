"""Runs that generate, over two ranks by Ray: the driver generates, both ranks learn, as in one process."""

import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.cli.main import main
from hone.models.settings import BuildConfig, ModelConfig
from hone.runtime import ray as runtime
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.collection import Collector
from hone.trainers.run.run_model import local_model
from tests.ranks import run_ranks
from tests.trainers.tiny import BASE, PPO, metrics, recipe

OWN_LOSS = Path(__file__).parents[2] / "recipes" / "own_algorithm" / "one_file.py"
RAY = ("runtime.backend.name=ray", "runtime.backend.devices=2", "runtime.collective_timeout_s=60")


@pytest.fixture(scope="module", autouse=True)
def pool():
    """Two ranks, kept for all runs of this file."""
    return runtime._pool("actor", RuntimeConfig(backend=RaySettings(devices=2), threads=1, collective_timeout_s=60))


def start(command, path, *overrides):
    """How a command ends, and what it says."""
    with redirect_stderr(StringIO()) as said:
        try:
            code = main([command, str(path), *overrides])
        except SystemExit as error:
            code = error.code
    return {"code": code, "said": said.getvalue()}


def assert_same_record(one, other):
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine.keys() == theirs.keys()
        learned = [name for name in theirs if not name.startswith("rollout/")]  # a server's batches depend on the time
        assert {n: mine[n] for n in learned} == pytest.approx({n: theirs[n] for n in learned}, abs=2e-5, rel=1e-4)


def distillation(folder):
    """A distillation whose teacher is asked through a rollout engine, with a policy loss of the user's own."""
    model = ModelConfig(build=BuildConfig(**{**BASE["model"]["build"], "seed": 5}))
    teacher = {"model": {"path": str(local_model(model, folder / "teacher").path)}, "served_by": "rollout"}
    sections = {"kind": "distill", "distillation": {"teachers": {"a": teacher}, "task_coef": 0.5}, "run": {"steps": 3}}
    (folder / "loss.py").write_text(OWN_LOSS.read_text(encoding="utf-8"), encoding="utf-8")
    sections["algorithm"] = {"loss": f"{os.path.relpath(folder / 'loss.py')}:Softened"}
    return "distill", recipe(folder, sections)


def ppo(folder):
    """PPO with a warm start and a server in a process of its own."""
    rows = {"source": {"name": "python", "function": f"{folder / 'task.py'}:rows", "size": 64, "seed": 1}}
    warm = {"data": {"train": {**rows, "answer_template": "{{ ground_truth }}"}}, "steps": 2, "samples_per_step": 4}
    warm["actor"] = {"compute_dtype": "float32", "max_tokens_per_microbatch": 64}
    rollout = {**BASE["rollout"], "builtin": {"process": "separate", "execution": "generic"}}
    sections = {"warm_start": warm, "rollout": rollout, "weights": {"timeout_s": 120}, "run": {"steps": 3}}
    return "train", recipe(folder, PPO, sections)


@pytest.mark.slow
@pytest.mark.parametrize("written", [distillation, pytest.param(ppo, marks=pytest.mark.ci)])
def test_two_ranks_learn_what_one_process_learns(tmp_path, written):
    assert start(*written(tmp_path / "alone"))["code"] == 0
    assert start(*written(tmp_path / "spread"), *RAY)["code"] == 0
    alone, spread = (tmp_path / kind / "run" for kind in ("alone", "spread"))
    assert_same_record(spread, alone)
    one, other = (load_file(run / "export" / "model.safetensors") for run in (spread, alone))
    for key, weight in one.items():
        torch.testing.assert_close(other[key], weight, rtol=1e-4, atol=1e-4)
    asked = [json.loads(line)["token_ids"] for line in rollout_lines(spread / "rollouts.jsonl.gz")]
    expected = [json.loads(line)["token_ids"] for line in rollout_lines(alone / "rollouts.jsonl.gz")]
    assert asked == expected


@pytest.mark.slow
def test_a_spread_run_is_continued_by_one_process_and_back(tmp_path):
    whole = recipe(tmp_path / "whole", {"run": {"steps": 6}})
    assert start("train", whole)["code"] == 0
    cut = recipe(tmp_path / "cut", {"run": {"steps": 6}})
    assert start("train", cut, *RAY, "run.steps=2")["code"] == 0
    assert start("train", cut, "run.steps=4")["code"] == 0
    assert start("train", cut, *RAY)["code"] == 0
    kept = [row for row in metrics(tmp_path / "cut" / "run") if row["step"] in (1, 2, 3, 4, 5)]
    for mine, theirs in zip(kept, metrics(tmp_path / "whole" / "run")[1:6], strict=True):
        same = [name for name in theirs if not name.startswith("eval/")]  # shorter runs measure their own ends
        assert all(mine[name] == pytest.approx(theirs[name], abs=2e-5, rel=1e-4) for name in same)


# -------------------------------------------------------------------------------------------------------------- traces


def names_in(trace):
    """What a trace shows, by category: operators (`cpu_op`), named blocks (`user_annotation`)."""
    found = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        found.setdefault(event.get("cat"), set()).add(event["name"])
    return found


def has_backward(trace):
    return any("Backward" in name for name in names_in(trace)["cpu_op"])


@pytest.mark.slow
def test_each_rank_traces_the_chosen_steps_of_all_its_roles(tmp_path):
    """In step 1, rank 1 cannot write its trace, which costs a line and not the run. Step 3 is not chosen."""
    folder = tmp_path / "run" / "profile"
    (folder / "step-1-rank-1.json").mkdir(parents=True)
    small = ["run.steps=3", "evaluation.every_steps=0", "update.minibatches=1", "update.epochs=1"]
    found = start("train", recipe(tmp_path, PPO), *RAY, *small, "profile.steps=[1, 2]")
    assert found["code"] == 0, found["said"]
    assert f"no trace {folder}/step-1-rank-1.json from rank 1 of 2" in found["said"]
    assert f"trace of step 2: {folder}/step-2.json, and 2 of ranks next to it" in found["said"]
    ranks = [folder / f"step-2-rank-{rank}.json" for rank in range(2)]
    wanted = {*ranks, folder / "step-2.json", folder / "step-1.json", folder / "step-1-rank-0.json"}
    assert {path for path in folder.iterdir() if path.is_file()} == wanted
    calls = {"train_batch of actor", "train_batch of critic", "infer_batch of reference", "stream of actor"}
    for rank in ranks:
        assert has_backward(rank)
        assert calls <= names_in(rank)["user_annotation"]
    assert not has_backward(folder / "step-2.json")
    assert calls.isdisjoint(names_in(folder / "step-2.json").get("user_annotation", ()))


@pytest.mark.slow
def test_a_step_that_fails_ends_its_traces_on_every_rank(pool, tmp_path, monkeypatch):
    """The next run has the same ranks, and traces one of them."""
    whole = Collector.collect

    def fail(self, prompts, *asked, **named):
        raise RuntimeError("no room to play")

    monkeypatch.setattr(Collector, "collect", fail)
    unmeasured = {"evaluation": {"sets": {}}}  # step 1 then takes the first prompts
    found = start("train", recipe(tmp_path / "fails", unmeasured), *RAY, "profile.steps=1")
    assert found["code"] == 1
    assert "error: the run failed: RuntimeError: no room to play" in found["said"]
    assert not (tmp_path / "fails" / "run" / "profile").exists()
    pool.everywhere(lambda rank, actor: actor.end_trace.remote(tmp_path / f"{rank}.json"), "end_trace", "pool")
    assert not list(tmp_path.glob("*.json")), "a rank was still recording"
    monkeypatch.setattr(Collector, "collect", whole)
    one = ["run.steps=2", "profile.steps=2", "profile.ranks=1"]
    assert start("train", recipe(tmp_path / "works", unmeasured), *RAY, *one)["code"] == 0
    traces = tmp_path / "works" / "run" / "profile"
    assert sorted(path.name for path in traces.iterdir()) == ["step-2-rank-1.json", "step-2.json"]
    assert has_backward(traces / "step-2-rank-1.json")


def test_a_rank_that_no_pool_has_cannot_be_traced(tmp_path):
    traced = ["profile.steps=1", "profile.ranks=[0, 2]"]
    found = start("train", recipe(tmp_path), *RAY, *traced)
    assert found["code"] == 2
    assert "ranks: the run has no rank 2; choose from 0 to 1" in found["said"]
    found = start("train", recipe(tmp_path), *RAY, *traced, "runtime.backend.pools.critic.devices=3")
    assert "runtime.backend.pools.critic.devices" in found["said"], "the run has no critic: counting is not using"


# --------------------------------------------------------------------------------------------------- ends of all kinds


def test_a_signal_while_generating_ends_the_run_after_its_step(tmp_path, monkeypatch):
    whole, plays = Collector.collect, []

    def play(self, prompts, *asked, **named):
        plays.append(len(prompts))
        if len(plays) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, prompts, *asked, **named)

    monkeypatch.setattr(Collector, "collect", play)
    assert start("train", recipe(tmp_path, {"run": {"steps": 6}}), *RAY)["code"] == 130
    assert metrics(tmp_path / "run")[-1]["step"] == 2
    assert (tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json").is_file()


def test_an_error_while_generating_ends_the_run(tmp_path, monkeypatch):
    def play(self, prompts, *asked, **named):
        raise RuntimeError("no room to play")

    monkeypatch.setattr(Collector, "collect", play)
    found = start("train", recipe(tmp_path), *RAY)
    assert found["code"] == 1
    assert "error: the run failed: RuntimeError: no room to play" in found["said"]


# ------------------------------------------------------------------------------------------------------ under torchrun


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "distill"])
def test_torchrun_is_refused_with_the_line_to_type(tmp_path, command):
    teachers = {"a": {"model": {"path": "never/read"}}}
    sections = {"kind": "distill", "distillation": {"teachers": teachers}} if command == "distill" else {}
    path = recipe(tmp_path, sections)
    for found in run_ranks(2, start, command, path):
        assert found["code"] == 2
        assert f"`hone {command} RUN.yaml runtime.backend=ray runtime.backend.devices=2` without" in found["said"]
    assert not (tmp_path / "run").exists()


def test_ranks_of_several_machines_are_named_in_the_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = start("train", recipe(tmp_path))
    assert "runtime.backend=ray runtime.backend.devices=2 runtime.backend.nodes=4` without torchrun" in found["said"]


@pytest.mark.slow
def test_torchrun_itself_ends_at_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hone"]
    done = subprocess.run([*command, "train", str(recipe(tmp_path))], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "runs that generate use several devices by Ray" in done.stderr
