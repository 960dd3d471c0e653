"""Runs that skip prompts whose last groups had no variance, before they are played."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hone.config import ConfigError, load
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import metrics, recipe

REASON = "skipped before rollout: expected to have no variance"
# Answers to prompts that end in "a" or "b" are all worth the same; those to the others are worth their length.
JUDGE = "def judge(r, ground_truth, row): return 1.0 if ground_truth[0] in 'ab' else float(len(r)) + r.count('a') / 9"


def change(folder, **skip):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "judge.py").write_text(JUDGE, encoding="utf-8")
    task = folder / "task.py"
    rows = {"source": {"name": "python", "function": f"{task}:rows", "size": 12, "seed": 1}}
    return {
        "algorithm": {"dynamic_sampling": {"max_draws": 1, "skip_zero_variance": {"explore_step": 0.0, **skip}}},
        "reward": {"components": {"x": {"reward": f"{folder}/judge.py:judge"}}, "workers": 1},
        "data": {"train": rows},
        "update": {"prompts_per_step": 3, "samples_per_prompt": 10},
        "evaluation": {},
        "checkpoint": {"every_steps": 2, "keep": 9},
        "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
        "run": {"steps": 6},
    }


def train(folder, settings, *overrides):
    run_policy(load(PolicyRunConfig, recipe(folder, settings), list(overrides)))
    lines = list(rollout_lines(folder / "run" / "rollouts.jsonl.gz"))
    return metrics(folder / "run"), [json.loads(line) for line in lines]


def state(run, step):
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "state.json").read_text(encoding="utf-8"))["state"]


def test_prompts_that_taught_nothing_are_not_played_again(tmp_path):
    steps, rollouts = train(tmp_path, change(tmp_path, explore=1e-9))
    played = {}
    for one in rollouts:
        played.setdefault(one["prompt_id"], {})[one["draw"]] = one["step"]
    flat = {one["prompt_id"] for one in rollouts if one["ground_truth"][0] in "ab"}
    assert flat
    # In one step without variance, never again in a later one: the chance to come back is 0.01.
    assert all(len(set(played[name].values())) == 1 for name in flat)
    assert any(len(set(draws.values())) > 1 for draws in played.values())
    skipped = sum(step["rollout/prompts_skipped"] for step in steps[1:])
    final = state(tmp_path / "run", 6)
    assert final["ledger"]["dropped"][REASON] == skipped > 0
    assert final["ledger"]["open"] == {}
    draws = {draw for draws in played.values() for draw in draws}
    assert final["ledger"]["next"] == len(draws) + skipped
    assert set(final["algorithm"]["prompts"]["streaks"]) >= flat


def test_a_prompt_that_is_explored_comes_back(tmp_path):
    steps, rollouts = train(tmp_path, change(tmp_path, explore=1.0))
    assert all(step["rollout/prompts_skipped"] == 0 for step in steps[1:])
    flat = [one["draw"] for one in rollouts if one["ground_truth"][0] in "ab"]
    assert len(set(flat)) > len({one["prompt_id"] for one in rollouts if one["ground_truth"][0] in "ab"})


@pytest.mark.slow
def test_two_halves_equal_the_whole_and_draws_are_the_seeds(tmp_path):
    moving = {"explore": 0.5, "explore_step": 0.05}
    whole, _ = train(tmp_path / "whole", change(tmp_path / "whole", **moving))
    train(tmp_path / "halves", change(tmp_path / "halves", **moving), "run.steps=4")
    halves, _ = train(tmp_path / "halves", change(tmp_path / "halves", **moving))
    assert whole == halves
    assert sum(step["rollout/prompts_skipped"] for step in whole[1:]) > 0
    assert len({step["rollout/explore_easy"] for step in whole[1:]}) > 1
    runs = [tmp_path / name / "run" for name in ("whole", "halves")]
    assert (runs[0] / "rollouts.jsonl.gz").read_bytes() == (runs[1] / "rollouts.jsonl.gz").read_bytes()
    assert state(runs[0], 6) == state(runs[1], 6)
    one, other = (load_file(run / "export" / "model.safetensors") for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_wrong_chance_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"skip_zero_variance\.explore"):
        load(PolicyRunConfig, recipe(tmp_path, change(tmp_path, explore=0.0)))
