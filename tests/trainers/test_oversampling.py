"""Oversampling ends a step early, and changes nothing else: neither what is trained on, nor which prompts come next."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from hone.config import load
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import metrics, recipe

# Only groups of prompts that end in "a", "b" or "c" have any variance.
JUDGE = "def judge(response, ground_truth, row): return float(len(response)) if ground_truth[0] in 'abc' else 0.0\n"

# One answer to the 8th prompt waits until its process is killed; one to the 1st prompt waits until that one waits.
SLOW = """
import asyncio, os
from pathlib import Path
FOLDER = Path(__file__).parent
def claimed(name):
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
async def judge(response, ground_truth, row):
    if row["place"] == 7 and claimed("last"):
        await asyncio.to_thread((FOLDER / "began").write_bytes, b"x")
        await asyncio.Event().wait()
    if row["place"] == 0 and claimed("first"):
        await asyncio.to_thread((FOLDER / "began").read_bytes)
    return float(len(response)) + response.count("a") / 9
"""

ROWS = """
def rows(seed, size):
    return [{"prompt": "abcd"[place % 4] * 3, "ground_truth": "a", "place": place} for place in range(size)]
"""


def settings(folder, judge, oversample, **changes):
    folder.mkdir(parents=True)
    (folder / "judge.py").write_text(judge, encoding="utf-8")
    return recipe(
        folder,
        {
            "algorithm": {"dynamic_sampling": {"max_draws": 8, "oversample": oversample}},
            "reward": {"components": {"x": {"reward": f"{folder}/judge.py:judge"}}, "workers": 2},
            "evaluation": {},
            "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
            **changes,
        },
    )


def train(path, *overrides):
    run_policy(load(PolicyRunConfig, path, list(overrides)))
    return path.parent / "run"


def state(run, step):
    return json.loads((run / f"checkpoints/step_{step:08d}/state.json").read_text(encoding="utf-8"))["state"]


def rollouts(run):
    """Draw and tokens of each answer, dropped groups included; which round of a step they came from plays no part."""
    lines = [json.loads(line) for line in rollout_lines(run / "rollouts.jsonl.gz")]
    return sorted((one["step"], one["draw"], one["sample"], one["response"], one["status"]) for one in lines)


def assert_same_weights(one, other):
    a, b = (load_file(run / "export/model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Draws exactly what is missing."""
    return train(settings(tmp_path_factory.mktemp("exact") / "run_file", JUDGE, 1.0), "run.steps=4")


def test_oversampling_trains_on_the_same_answers_in_fewer_draws(tmp_path, exact):
    run = train(settings(tmp_path / "over", JUDGE, 3.0), "run.steps=4")
    assert rollouts(run) == rollouts(exact)
    assert_same_weights(run, exact)
    for name in ("prompts", "ledger"):
        assert state(run, 4)[name] == state(exact, 4)[name]
    ledger = state(run, 4)["ledger"]
    assert ledger["trained"] == 16
    assert ledger["trained"] + sum(ledger["dropped"].values()) == ledger["next"] > 16
    assert ledger["open"] == {}
    steps = metrics(run)[1:]
    assert [one["rollout/prompts_used"] + one["rollout/prompts_put_back"] for one in steps] == [12] * 4, "one draw each"
    assert sum(one["rollout/prompts_used"] for one in steps) == ledger["next"]
    assert [one["rollout/groups_dropped"] for one in steps] == [
        one["rollout/groups_dropped"] for one in metrics(exact)[1:]
    ]


@pytest.mark.slow
def test_a_stopped_run_continues_with_the_prompts_that_were_put_back(tmp_path, exact):
    path = settings(tmp_path / "halves", JUDGE, 3.0)
    train(path, "run.steps=2")
    assert_same_weights(train(path, "run.steps=4"), exact)


@pytest.mark.slow
def test_answers_at_a_server_are_aborted(tmp_path, exact):
    server = {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "start_timeout_s": 120}
    path = settings(tmp_path / "server", JUDGE, 3.0, rollout=server, weights={"timeout_s": 60})
    run = train(path, "run.steps=4")
    assert rollouts(run) == rollouts(exact)
    assert_same_weights(run, exact)


def test_a_step_does_not_wait_for_answers_that_it_does_not_need(tmp_path):
    """The reward of the last of 8 prompts never comes; the first 4 are enough."""
    folder = tmp_path / "slow"
    path = settings(
        folder,
        SLOW,
        2.0,
        data={
            "train": {"source": {"name": "python", "function": f"{folder}/rows.py:rows", "size": 64, "seed": 1}},
            "shuffle": False,
        },
        update={"prompts_per_step": 4, "samples_per_prompt": 16},
    )
    (folder / "rows.py").write_text(ROWS, encoding="utf-8")
    os.mkfifo(folder / "began")
    run = train(path, "run.steps=2")
    steps = metrics(run)[1:]
    assert (folder / "last").exists(), "an answer to the last prompt was being scored"
    assert [one["rollout/prompts_put_back"] for one in steps] == [4, 4]
    assert [one["reward/timeouts"] for one in steps] == [0, 0]
    assert [one["rollout/status/reward_failed"] for one in steps] == [0, 0]
    ledger = state(run, 2)["ledger"]
    assert (ledger["trained"], ledger["next"], ledger["open"]) == (8, 8, {})
    assert {draw for step, draw, *_ in rollouts(run) if step == 2} == {4, 5, 6, 7}, "those put back, the slow one too"


@pytest.mark.slow
def test_skipped_prompts_that_are_put_back_are_not_counted(tmp_path):
    skipping = {"max_draws": 8, "oversample": 4.0, "skip_zero_variance": {"explore": 0.01, "explore_step": 0.0}}
    rows = {"source": {"name": "python", "function": f"{tmp_path / 'skip'}/task.py:rows", "size": 12, "seed": 1}}
    path = settings(tmp_path / "skip", JUDGE, 1.0, algorithm={"dynamic_sampling": skipping}, data={"train": rows})
    run = train(path, "run.steps=4")
    ledger = state(run, 4)["ledger"]
    skipped = sum(one["rollout/prompts_skipped"] for one in metrics(run)[1:])
    assert ledger["dropped"]["skipped before rollout: expected to have no variance"] == skipped > 0
    assert ledger["trained"] + sum(ledger["dropped"].values()) == ledger["next"]
    assert state(run, 4)["prompts"]["sets"]["train"]["taken"] == ledger["next"]
