"""The run files that learn from preferences: a few steps of each, at their own sizes."""

from pathlib import Path

import pytest

from hone.cli.main import main
from hone.registry import resolve
from tests.trainers.tiny import metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("runtime.threads=1", "tracking.trackers=[jsonl]", "actor.schedule.warmup_fraction=0.25",
         "evaluation.every_steps=0", "evaluation.sets.held_out.source.size=64", "samples_per_step=16")  # fmt: skip


@pytest.fixture(autouse=True)
def _where_the_recipes_are(monkeypatch):
    monkeypatch.chdir(ROOT)  # their paths are relative to the project


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "recipe", "steps"),
    [
        ("prefer", "preference/dpo.yaml", 12),
        ("prefer", "preference/kto.yaml", 10),
        ("prefer", "preference/simpo.yaml", 12),
        ("prefer", "preference/orpo.yaml", 10),
        ("reward-model", "reward_model/bradley_terry.yaml", 12),
        ("reward-model", "reward_model/process.yaml", 10),
    ],
)
def test_a_few_steps_lower_the_held_out_loss(tmp_path, command, recipe, steps):
    told = [command, f"recipes/{recipe}", f"run.dir={tmp_path}/run", f"run.steps={steps}", *SMALL]
    assert main(told) == 0
    found = metrics(tmp_path / "run")
    assert found[-1]["eval/held_out/loss"] < found[0]["eval/held_out/loss"] - 0.001
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_policy_learns_from_the_reward_model_beside_it(tmp_path):
    judge = [f"run.dir={tmp_path}/judge", "run.steps=4", *SMALL]
    assert main(["reward-model", "recipes/reward_model/bradley_terry.yaml", *judge]) == 0
    small = ("run.steps=2", "warm_start.steps=4", "warm_start.actor.schedule.warmup_steps=2",
             "update.prompts_per_step=4", "evaluation.every_steps=0",
             "evaluation.sets.held_out.source.size=8", "tracking.trackers=[jsonl]")  # fmt: skip
    places = (f"run.dir={tmp_path}/policy", f"reward.components.preferred.model.path={tmp_path}/judge/export")
    assert main(["train", "recipes/reward_model/policy.yaml", *small, *places]) == 0
    last = metrics(tmp_path / "policy")[-1]
    assert (last["step"], last["reward/failed"]) == (2, 0)
    assert last["reward/preferred"] != 0
    assert last["reward/mean"] == pytest.approx(last["reward/preferred"], abs=1e-5)


def test_faults_are_places_without_their_letter():
    faults = resolve("recipes/reward_model/task.py:faults")
    worth = {"abc": 0, "cab": 3, "abd": 1, "ab": 1, "abca": 1, "": 3, "bc": 3}
    assert {answer: faults(list(answer), list("abc")) for answer in worth} == worth


def test_the_pairs_are_what_the_page_says():
    for row in resolve("recipes/preference/task.py:pairs")(seed=1, size=200):
        direction, word = row["prompt"].split()
        assert row["chosen"] == "".join(sorted(word, reverse=direction == "down"))
        assert row["rejected"] != row["chosen"]
        assert sorted(row["rejected"]) == sorted(word)


def test_comparisons_and_steps_are_labelled_right():
    for row in resolve("recipes/reward_model/task.py:comparisons")(seed=1, size=200):
        target = sorted(row["prompt"].split()[1])
        wrong = []
        for answer in (row["chosen"], row["rejected"]):
            places = max(len(answer), len(target))
            wrong.append(sum(answer[i : i + 1] != "".join(target[i : i + 1]) for i in range(places)))
        assert row["margin"] == pytest.approx(0.2 * (wrong[1] - wrong[0]))
        assert wrong[0] < wrong[1]
    for row in resolve("recipes/reward_model/task.py:selections")(seed=1, size=200):
        left = set(row["prompt"].split()[1])
        for step, label in zip(row["completions"], row["labels"], strict=True):
            taken = step.removeprefix("take ")
            assert label == (taken == min(left))
            left.remove(taken)
