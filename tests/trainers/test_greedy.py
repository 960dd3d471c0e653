"""Runs whose baseline is one greedy answer to each prompt (remax), with advantages worked out from the records."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hone.config import ConfigError, load
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import metrics, recipe

REMAX = {
    "algorithm": {"advantage": "remax", "loss": "reinforce"},
    "evaluation": {},
    "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
}


def train(folder, *changes, overrides=()):
    run_policy(load(PolicyRunConfig, recipe(folder, REMAX, *changes), list(overrides)))
    lines = list(rollout_lines(folder / "run" / "rollouts.jsonl.gz"))
    return metrics(folder / "run"), [json.loads(line) for line in lines]


def logprob_sum(one):
    return sum(one["rollout_logprobs"])


def test_the_advantage_is_the_reward_minus_that_of_the_greedy_answer(tmp_path):
    steps, rollouts = train(tmp_path, {"run": {"steps": 2}})
    assert len(rollouts) == 2 * 4 * 4  # the greedy answers are not among them
    for one in rollouts:
        assert one["reward"] == one["components"]["share"]
    for number in (1, 2):
        played = [one for one in rollouts if one["step"] == number]
        baselines = {}
        for one in played:
            baselines.setdefault(one["prompt_id"], set()).add(one["components"]["greedy_reward"])
        assert all(len(found) == 1 for found in baselines.values())
        # reinforce: the mean over tokens of -A log p, and A is the reward minus the greedy one's on every token.
        loss = sum(-(one["reward"] - one["components"]["greedy_reward"]) * logprob_sum(one) for one in played)
        tokens = sum(one["response_length"] for one in played)
        assert steps[number]["train/policy_loss"] == pytest.approx(loss / tokens, rel=1e-4)
        mean = sum(one["components"]["greedy_reward"] for one in played) / len(played)
        assert steps[number]["rollout/greedy_reward"] == pytest.approx(mean)
        assert steps[number]["rollout/trajectories"] == len(played) == 16
        assert steps[number]["reward/mean"] == pytest.approx(sum(one["reward"] for one in played) / 16)
        assert steps[number]["rollout/greedy_failed"] == 0
        assert steps[number]["reward/scored"] == 20  # the processes judged the greedy answers too
    assert not any(name == "reward/greedy_reward" for step in steps for name in step)


def test_the_overlong_penalty_is_in_the_baseline_too(tmp_path):
    change = {"algorithm": {**REMAX["algorithm"], "overlong": {"buffer_tokens": 2, "factor": 0.5}}, "run": {"steps": 1}}
    zero = tmp_path / "judge.py"
    zero.write_text("def judge(response, ground_truth, row): return 0.0", encoding="utf-8")
    _, rollouts = train(tmp_path, change, {"reward": {"components": {"x": {"reward": f"{zero}:judge"}}, "workers": 1}})
    assert {one["components"]["greedy_reward"] for one in rollouts} <= {0.0, -0.25, -0.5}
    assert -0.5 in {one["components"]["greedy_reward"] for one in rollouts}  # a greedy answer of all 3 tokens


FAILS_GREEDILY = """
calls = {}
def judge(response, ground_truth, row):
    # The fifth answer to a prompt that is judged is the greedy one; it fails for prompts that begin with a or b.
    if ground_truth[-1] in "ab" and row["prompt_id"] in calls and len(calls[row["prompt_id"]]) % 5 == 4:
        calls[row["prompt_id"]].append(response)
        raise RuntimeError("the judge of greedy answers is out")
    calls.setdefault(row["prompt_id"], []).append(response)
    return float(response.count(ground_truth[0]))
"""


def test_a_failed_greedy_answer_drops_its_group_with_a_reason(tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(FAILS_GREEDILY, encoding="utf-8")
    components = {"x": {"reward": f"{judge}:judge"}}
    reward = {"reward": {"components": components, "workers": 1, "max_failed_fraction": 1.0}}
    steps, rollouts = train(tmp_path, reward, {"run": {"steps": 3}, "checkpoint": {"every_steps": 1}})
    lost = [one for one in rollouts if one["ground_truth"][-1] in "ab"]
    kept = [one for one in rollouts if one["ground_truth"][-1] not in "ab"]
    assert lost
    assert kept
    assert {one["status"] for one in lost} == {"reward_failed"}
    assert all("the greedy answer failed" in one["error"] and "is out" in one["error"] for one in lost)
    assert all("greedy_reward" not in one["components"] for one in lost)
    assert {one["status"] for one in kept} <= {"ok", "truncated"}
    groups = len(lost) // 4
    assert sum(step["rollout/greedy_failed"] for step in steps[1:]) == groups
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_00000003" / "state.json").read_text())["state"]
    assert state["ledger"]["dropped"] == {"the greedy answer failed: reward_failed": groups}


@pytest.mark.slow
def test_two_halves_equal_the_whole(tmp_path):
    change = {"run": {"steps": 4}, "checkpoint": {"every_steps": 2}}
    train(tmp_path / "whole", change)
    train(tmp_path / "halves", change, overrides=["run.steps=2"])
    train(tmp_path / "halves", change)
    whole, halves = tmp_path / "whole" / "run", tmp_path / "halves" / "run"
    assert metrics(whole) == metrics(halves)
    assert (whole / "rollouts.jsonl.gz").read_bytes() == (halves / "rollouts.jsonl.gz").read_bytes()
    one, other = (load_file(run / "export" / "model.safetensors") for run in (whole, halves))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_component_that_bears_the_baselines_name_is_refused(tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(response, ground_truth, row): return 0.0", encoding="utf-8")
    reward = {"reward": {"components": {"greedy_reward": {"reward": f"{judge}:judge"}}, "workers": 1}}
    message = r"reward\.components\.greedy_reward: remax \+ reinforce uses this name for its baseline"
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, reward)
