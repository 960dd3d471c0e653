"""A run whose reward compares the answers to a prompt, with dynamic sampling, and one whose reward fails for groups."""

import json

from hone.cli.main import main
from hone.tracking.trackers.jsonl import rollout_lines
from tests.trainers.tiny import metrics, recipe

REWARDS = '''
def rare(responses, ground_truth):
    """How many answers of the group are different: a character counts if it is right."""
    return [sum(other != one for other in responses) + (one == ground_truth) for one in responses]

def short(responses, ground_truth):
    return [0.0] * (len(responses) - 1) if "a" in ground_truth else [float(len(one)) for one in responses]
'''


def run(folder, function, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "group_rewards.py").write_text(REWARDS, encoding="utf-8")
    component = {"reward": f"{folder / 'group_rewards.py'}:{function}"}
    reward = {"components": {function: component}, "workers": 1, "max_failed_fraction": 1.0}
    tracking = {"trackers": ["jsonl"], "rollouts_per_step": "all"}
    evaluation = {"every_steps": 0}
    path = recipe(folder, {"reward": reward, "tracking": tracking, "evaluation": evaluation}, changes)
    # Without special tokens in them, some of these short answers are the same.
    assert main(["train", str(path), "run.steps=2", "data.chat.special_tokens_in_answers=false"]) == 0
    groups = {}
    for line in rollout_lines(folder / "run" / "rollouts.jsonl.gz"):
        row = json.loads(line)
        groups.setdefault((row["step"], row["prompt_id"]), []).append(row)
    return list(groups.values())


def test_each_answer_is_rewarded_against_its_group(tmp_path):
    sampling = {"metric": "reward", "max_draws": 3, "oversample": 1.5}
    groups = run(tmp_path, "rare", algorithm={"dynamic_sampling": sampling})
    assert {len(group) for group in groups} == {4}
    for group in groups:
        said = [row["response"] for row in group]
        expected = [sum(b != a for b in said) + (a == group[0]["ground_truth"]) for a in said]
        assert [row["components"]["rare"] for row in group] == expected
        kept = group[0]["status"] != "filtered"  # more groups were drawn than the step needed
        assert [row["reward"] for row in group] == (expected if kept else [None] * 4)
    assert sum(group[0]["status"] != "filtered" for group in groups) == 8
    assert metrics(tmp_path / "run")[-1]["train/grad_norm"] > 0


def test_a_group_that_fails_is_not_trained_on(tmp_path):
    groups = run(tmp_path, "short")
    failed = [group for group in groups if "a" in group[0]["ground_truth"]]
    assert 0 < len(failed) < len(groups)
    for group in groups:
        for row in group:
            assert (row["status"] == "reward_failed") is (group in failed)
    error = "short: ValueError: the reward of a group returned 3 values for 4 answers"
    assert {row["error"] for group in failed for row in group} == {error}
    answers = [step["reward/failed"] for step in metrics(tmp_path / "run")[1:]]
    assert sum(answers) == 4 * len(failed)
