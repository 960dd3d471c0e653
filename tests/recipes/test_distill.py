"""The run files of distillation and PRIME, a few steps of each."""

from pathlib import Path

import pytest

from hone.cli.main import main
from hone.registry import resolve
from tests.trainers.tiny import metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("runtime.threads=1", "tracking.trackers=[jsonl]")


@pytest.fixture(autouse=True)
def _where_the_recipes_are(monkeypatch):
    monkeypatch.chdir(ROOT)  # their paths are relative to the project


def run(command, recipe, folder, *overrides):
    assert main([command, f"recipes/{recipe}", f"run.dir={folder}", *SMALL, *overrides]) == 0
    return metrics(folder)


@pytest.mark.slow
def test_a_teacher_is_trained_and_teaches(tmp_path):
    small = ("run.steps=2", "evaluation.sets.held_out.source.size=8")
    run("sft", "distill/teacher.yaml", tmp_path / "teacher", *small)
    steps = run(
        "distill", "distill/on_policy.yaml", tmp_path / "student", "run.steps=1", "update.prompts_per_step=4",
        f"distillation.teachers.reverse.model.path={tmp_path}/teacher/export",
        "evaluation.sets.held_out.source.size=8",
    )  # fmt: skip
    assert "eval/held_out/exact_match" in steps[0]
    assert steps[1]["rollout/trajectories"] == 4 * 4
    assert steps[1]["train/distillation_loss"] > 0.0
    assert steps[1]["train/policy_loss"] == 0.0


@pytest.mark.slow
def test_prime_trains_its_process_reward_model(tmp_path):
    small = ("run.steps=1", "update.prompts_per_step=4", "algorithm.dynamic_sampling=null", "warm_start.steps=12",
             "warm_start.samples_per_step=4", "evaluation.sets.held_out.source.size=8")  # fmt: skip
    steps = run("train", "prime/reverse.yaml", tmp_path / "run", *small)
    assert steps[1]["process_reward/cross_entropy"] == pytest.approx(0.6931, abs=1e-3)
    assert (tmp_path / "run/checkpoints/step_00000001/process_reward").is_dir()


def test_the_splits_share_no_string():
    rows = resolve("recipes/distill/task.py:rows")
    train, held_out = (
        {row["prompt"] for row in rows(seed=1, size=2000, split=split, tasks=("reverse", "sort"), length=3)}
        for split in ("train", "held_out")
    )
    assert not {one[1:] for one in train} & {one[1:] for one in held_out}
    answers = {row["prompt"]: row["ground_truth"] for row in rows(3, 500, "train", ("reverse", "sort"))}
    assert all(
        answer == (text[:0:-1] if text[0] == "<" else "".join(sorted(text[1:]))) for text, answer in answers.items()
    )
