"""Steps whose groups were mostly, or wholly, filtered out."""

import pytest
import torch
from safetensors.torch import load_file

from hone.config import load
from hone.trainers.policy.health import RewardsFailed
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import metrics, recipe

SAMPLING = {"algorithm": {"dynamic_sampling": {"max_draws": 2}}, "evaluation": {}}


def train(folder, reward, **changes):
    (folder / "rewards.py").write_text(reward, encoding="utf-8")
    components = {"components": {"x": {"reward": f"{folder}/rewards.py:judge"}}, "workers": 1}
    path = recipe(folder, SAMPLING | {"reward": components} | changes)
    run_policy(load(PolicyRunConfig, path, ["run.steps=2"]))
    return metrics(folder / "run")[1:]


def test_a_step_whose_groups_are_all_filtered_changes_no_weight_and_says_so(tmp_path):
    steps = train(tmp_path, "def judge(response, ground_truth, row): return 1.0")
    for step in steps:
        assert step["train/skipped_updates"] == 1
        assert step["rollout/status/filtered"] == 32  # 4 prompts x 4 answers, drawn twice
        assert "train/loss" not in step
    run = tmp_path / "run"
    before, after = (load_file(run / name / "model.safetensors") for name in ("model", "export"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_step_in_which_failures_leave_one_answer_of_each_group_fails_with_their_text(tmp_path):
    judge = """
calls = []
def judge(response, ground_truth, row):
    calls.append(1)
    if len(calls) % 4 != 1:
        raise RuntimeError("no judge here")
    return 1.0
"""
    with pytest.raises(RewardsFailed, match=r"12 reward_failed; the first failure: .*no judge here"):
        train(tmp_path, judge, algorithm={})


def test_fewer_groups_than_mini_batches_are_fewer_optimizer_steps(tmp_path):
    # Only groups of prompts that begin with "a" have any variance.
    judge = "def judge(response, ground_truth, row): return float(len(response)) if ground_truth[-1] == 'a' else 0.0"
    update = {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 4}
    steps = train(tmp_path, judge, update=update)
    kept = [4 * 2 - step["rollout/groups_dropped"] for step in steps]
    assert any(0 < groups < 4 for groups in kept), kept
    assert all(("train/loss" in step) == (groups > 0) for step, groups in zip(steps, kept, strict=True))
