"""Rewards that fail, and steps with nothing to learn from."""

import pytest

from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.trainers.policy.health import FAILED_STEPS, RewardsFailed, RunHealth
from hone.trainers.run.launch import run_policy
from hone.trainers.run.lost_steps import LostSteps
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup
from tests.trainers.tiny import metrics, recipe

HEALTHY = {
    "reward/max": 1.0, "reward/min": 0.0, "rollout/truncated_fraction": 0.5, "rollout/zero_variance_fraction": 0.5,
    "train/grad_norm": 0.1, "rollout/trajectories": 64.0, "rollout/status/reward_failed": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("failed", "ends"), [((13, 13, 13), True), ((0, 0, 64), False), ((64, 12, 64), False), ((64, 64), False)]
)
def test_too_many_failed_rewards_in_each_of_three_steps_end_the_run(failed, ends):
    """More than 0.2 of 64 answers: 12.8."""
    health = RunHealth(0.2)
    prompt = Prompt("train/7", (), (1,), None, "", {}, 0)
    one = Trajectory(
        "train/7", 2, (1, 2), 1, (0, 1), (0.0, -1.0), (-1, 0), "r", StopReason.STOP, Status.REWARD_FAILED,
        error="share: no answer\nwithin 5 s",
    )  # fmt: skip
    health.note([TrajectoryGroup(prompt, (one,))])
    steps = [{**HEALTHY, "rollout/status/reward_failed": float(count)} for count in failed]
    for step in steps[: FAILED_STEPS - 1]:
        health.look(step)
    if ends:
        with pytest.raises(
            RewardsFailed, match=r"39 of 192 .* = 0.2 in each; train/7 sample 2: share: no answer within"
        ):
            health.look(steps[-1])
    elif len(steps) == FAILED_STEPS:
        health.look(steps[-1])


def test_a_step_without_any_usable_answer_is_skipped_and_three_in_a_row_end_the_run():
    told = []
    lost = LostSteps(9, told.append)
    one = Trajectory("train/7", 0, (1,), 1, (0,), (0.0,), (-1,), "", StopReason.STOP, Status.REWARD_FAILED, error="out")
    groups = [TrajectoryGroup(Prompt("train/7", (), (1,), None, "", {}, 0), (one,))]
    for step in (1, 2, 4, 5):
        lost.note(step, groups)
    reason = "no answer of 1 groups can be trained on: 1 reward_failed; the first failure: out"
    assert told[-1] == f"error: step 5 is skipped: {reason}. The run ends after 3 such steps in a row"
    with pytest.raises(RewardsFailed, match=r"out .as in all of the last 3 steps"):
        lost.note(6, groups)
    with pytest.raises(RewardsFailed, match=r"the first failure: out$"):
        LostSteps(1, told.append).note(1, groups)


def test_an_outage_of_one_step_costs_this_step_only(tmp_path):
    task = tmp_path / "reward.py"
    task.write_text(
        "calls = []\n"
        "def away(response, ground_truth, row):\n"
        "    calls.append(1)\n"
        "    if 16 < len(calls) <= 32:\n"
        "        raise OSError('the judge is away')\n"
        "    return len(set(response)) / 3\n"
    )
    reward = {"reward": {"components": {"a": {"reward": f"{task}:away"}}, "workers": 1}}
    path = recipe(tmp_path / "r", reward, {"evaluation": {"every_steps": 0, "sets": {}}})
    run_policy(load_recipe(path, ["run.steps=4"], kind="rl"))
    steps = metrics(tmp_path / "r" / "run")[1:]
    assert [step.get("rollout/status/reward_failed", 0.0) for step in steps] == [0.0, 16.0, 0.0, 0.0]
    assert ["train/loss" in step for step in steps] == [True, False, True, True]


def test_a_run_whose_reward_mostly_fails_ends_with_its_cause_and_is_saved(tmp_path):
    task = tmp_path / "reward.py"
    task.write_text(
        "import zlib\n"
        "def fails(response, ground_truth, row):\n"
        "    if zlib.crc32(response.encode()) % 2:\n"
        "        raise OSError('the judge is gone')\n"
        "    return len(set(response)) / 3\n"
    )
    reward = {"reward": {"components": {"a": {"reward": f"{task}:fails"}}, "workers": 1}}
    path = recipe(tmp_path / "r", reward, {"evaluation": {"every_steps": 0, "sets": {}}})
    with pytest.raises(RewardsFailed, match=r"of 48 answers .* could not be scored.*the judge is gone"):
        run_policy(load_recipe(path, [], kind="rl"))
    assert (tmp_path / "r" / "run" / "checkpoints" / "step_00000003").is_dir()


def test_ground_truth_that_a_reward_needs_and_the_data_lack_is_an_error_at_start(tmp_path):
    path = recipe(tmp_path)
    text = (tmp_path / "task.py").read_text()
    (tmp_path / "task.py").write_text(text.replace('"ground_truth": text[::-1]', '"solution": text[::-1]'))
    with pytest.raises(
        ConfigError,
        match=r"reward.components.share: its function needs ground_truth, but prompt train/\d+ has none "
        r"\(columns: solution\); set data.train.columns.ground_truth to the column that has it",
    ):
        run_policy(load_recipe(path, [], kind="rl"))
