"""Answers are generated while the policy trains: the bound, the order, repeatability, and what a kill loses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.config import ConfigError, load
from hone.schedule.journal import JOURNAL, read_journal
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import BASE, metrics, recipe

STEPS = 6
AHEAD = {
    "run": {**BASE["run"], "steps": STEPS},
    "rollout": {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "start_timeout_s": 120},
    "weights": {"timeout_s": 60},
    "algorithm": {"correction": {"old": "rollout"}},
    "asynchrony": {"staleness": 1},
    "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
}
OF_THE_CLOCK = (  # what the server, the rewards and the weight sync did while a step took its time
    *("rollout/batch_size", "rollout/kv_cache_bytes", "rollout/prefill_tokens", "rollout/shared_prompt_tokens"),
    "rollout/cached_prompt_tokens",
    *("rollout/tokens", "rollout/lent", "rollout/requests", "rollout/aborted", "rollout/recomputed_tokens"),
    *("rollout/replica", "reward/scored", "reward/failed", "reward/timeouts", "reward/worker_restarts", "weights/"),
)


def train(path, *overrides):
    run_policy(load(PolicyRunConfig, path, list(overrides)))


def journal(run):
    return list(read_journal(run / JOURNAL))


def repeatable(run):
    """The metrics that do not say what happened to be going on while a step took its time."""
    return [{k: v for k, v in line.items() if not k.startswith(OF_THE_CLOCK)} for line in metrics(run)]


def assert_same(one, other):
    assert repeatable(one) == repeatable(other)
    for name in ("rollouts.jsonl.gz", JOURNAL, "export/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(recipe(folder, AHEAD))
    return folder / "run"


def test_each_draw_is_trained_once_in_order_and_within_the_bound(whole):
    records = journal(whole)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [len(record["admitted"]) for record in records] == [8, 4, 4, 4, 4, 0]
    assert [number for record in records for number in record["admitted"]] == list(range(24))
    assert [record["taken"] for record in records] == [[*range(n, n + 4)] for n in range(0, 24, 4)]
    sampled_from = [
        {version for spans in record["spans"].values() for answer in spans for version, _ in answer}
        for record in records
    ]
    assert sampled_from == [{0}, {0}, {1}, {2}, {3}, {4}]
    assert [record["version"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert [line["schedule/staleness_max"] for line in metrics(whole)[1:]] == [0, 1, 1, 1, 1, 1]


def test_an_evaluation_has_the_weights_of_its_step(whole):
    lines = [json.loads(line) for line in rollout_lines(whole / "rollouts.jsonl.gz")]
    versions = {line["step"]: set() for line in lines if line["set"] is not None}
    for line in lines:
        if line["set"] is not None:
            versions[line["step"]] |= {version for version, _ in line["weight_versions"]}
    assert versions == {0: {0}, 3: {3}, 6: {6}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.slow)],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(whole, tmp_path, way):
    path, run = recipe(tmp_path, AHEAD), tmp_path / "run"
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "hone", "train", str(path)], stdout=out, stderr=out, cwd=Path(__file__).parents[2]
        )
        try:
            deadline = time.monotonic() + 120
            while process.poll() is None and not (run / "checkpoints" / "step_00000002").is_dir():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            process.send_signal(way)
            assert process.wait(60) in (-way, 130, 0), log.read_text()
        finally:
            process.kill()
    train(path)
    assert_same(whole, run)
    assert sorted(os.listdir(run / "checkpoints")) == sorted(os.listdir(whole / "checkpoints"))


@pytest.mark.slow
def test_a_server_that_is_killed_changes_nothing(whole, tmp_path):
    """Two servers, one of which dies in the middle of the run: no draw is lost, and every token is the same."""
    path, run = recipe(tmp_path, AHEAD, {"rollout": {**AHEAD["rollout"], "replicas": 2}}), tmp_path / "run"
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "hone", "train", str(path)], stdout=out, stderr=out, cwd=Path(__file__).parents[2]
        )
        try:
            deadline = time.monotonic() + 240
            while not (run / "checkpoints" / "step_00000002").is_dir():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            assert len(metrics(run)) < STEPS, "it was over before the signal came"
            os.kill(server_of(process.pid), signal.SIGKILL)
            assert process.wait(240) == 0, log.read_text()
        finally:
            process.kill()
    assert_same(whole, run)


@pytest.mark.slow
def test_a_server_on_the_trainers_device_changes_nothing_and_helps(whole, tmp_path):
    """One request at a time at each server, so that the trainer waits."""
    few = {"rollout": {**AHEAD["rollout"], "requests_per_replica": 1}}
    train(recipe(tmp_path, AHEAD, few), "asynchrony.lend_trainer=true")
    assert_same(whole, tmp_path / "run")
    assert sum(line.get("rollout/lent_tokens", 0) for line in metrics(tmp_path / "run")) > 0


def server_of(trainer):
    """The process of a rollout server, which is a grandchild of the trainer: a supervisor stands between."""
    servers = [child for parent in children(trainer) for child in children(parent)]
    return next(one for one in servers if b"hone.workers.inside.builtin" in Path(f"/proc/{one}/cmdline").read_bytes())


def children(process):
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
def test_two_ahead_with_dropped_groups_replaced_from_those_ahead(tmp_path):
    """A reward that is the same for whole groups: some steps are short, and take more of what was drawn ahead."""
    algorithm = {**AHEAD["algorithm"], "dynamic_sampling": {"max_draws": 3}}
    train(recipe(tmp_path, AHEAD, {"asynchrony": {"staleness": 2}, "algorithm": algorithm}), "run.seed=5")
    records = journal(tmp_path / "run")
    taken = [number for record in records for number in record["taken"]]
    assert taken == list(range(len(taken)))
    assert any(record["dropped"] for record in records), "no group was dropped, so nothing was replaced"
    assert max(line["schedule/staleness_max"] for line in metrics(tmp_path / "run")[1:]) == 2


SECTIONS = {
    "the ratio would be 1": ({"algorithm": {}}, r"correction.old=rollout .*, or algorithm.correction.weights=token"),
    "the loss has no ratio": (
        {"algorithm": {"loss": "reinforce", "correction": {"old": "rollout"}}},
        r"this loss has no ratio .* set algorithm.correction.weights=token",
    ),
    "the engine is in the trainer": (
        {"rollout": {"sampling": {"max_response_tokens": 3}}},
        r"set rollout.builtin.process=separate",
    ),
    "the rollout sleeps": (
        {"rollout": {**AHEAD["rollout"], "sleep_while_training": "level_1"}},
        r"set rollout.sleep_while_training=none",
    ),
    "what is lent takes turns anyway": (
        {"asynchrony": {"lend_trainer": True}},
        r"lend_trainer with asynchrony.staleness = 0: generation and training take turns .* set asynchrony.staleness=1",
    ),
    "the trainer has one device": (
        {
            "asynchrony": {"staleness": 1, "lend_trainer": True},
            "rollout": {"sampling": {"max_response_tokens": 3}, "backend": "vllm", "tensor_parallel": 2},
        },
        r"lend_trainer with rollout.tensor_parallel = 2: .* set rollout.tensor_parallel=1",
    ),
    "more prompts than the step needs": (
        {"algorithm": {**AHEAD["algorithm"], "dynamic_sampling": {"max_draws": 2, "oversample": 2.0}}},
        r"set algorithm.dynamic_sampling.oversample=1",
    ),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_refused_at_start_because(name, tmp_path):
    change, message = SECTIONS[name]
    with pytest.raises(ConfigError, match=message):
        train(recipe(tmp_path, AHEAD, change))
