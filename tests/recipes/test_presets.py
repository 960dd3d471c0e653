"""The run files of recipes/presets: two steps of each, and the values that make each paper's method."""

from pathlib import Path

import pytest

from hone.algorithms.presets import PRESETS
from hone.cli.main import main
from hone.config import load
from hone.registry import resolve
from hone.trainers.policy.settings import PolicyRunConfig
from tests.trainers.tiny import metrics

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes" / "presets").glob("*.yaml"))
SMALL = (
    "run.steps=2",
    "warm_start.steps=2",
    "warm_start.actor.schedule.warmup_steps=1",
    "update.prompts_per_step=4",
    "update.samples_per_prompt=4",
    "evaluation.every_steps=0",
    "evaluation.sets.held_out.source.size=4",
    "tracking.trackers=[jsonl]",
)
WITH_CRITIC = {"vapo": ["critic.warmup_steps=1"], "pf_ppo": []}


@pytest.fixture(autouse=True)
def _where_the_recipes_are(monkeypatch):
    monkeypatch.chdir(ROOT)  # their paths are relative to the project


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
def test_the_preset_takes_its_first_steps(name, tmp_path):
    overrides = (*SMALL, *WITH_CRITIC.get(name, []), f"run.dir={tmp_path}/run")
    assert main(["train", f"recipes/presets/{name}.yaml", *overrides]) == 0
    steps = metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert ("critic/value_loss" in steps[2]) == (name in WITH_CRITIC)
    assert "train/ratio" in steps[2] or steps[2]["train/skipped_updates"] == 1  # dapo: no group with any variance


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_run_file_is_named_after_its_preset(path):
    config = load(PolicyRunConfig, str(path), []).config
    assert config.algorithm.preset == path.stem
    assert path.stem in PRESETS
    assert config.run.dir == f"runs/presets/{path.stem}"
    assert f"`{path.stem}.yaml`" in (path.parent / "README.md").read_text(encoding="utf-8")


def test_pf_ppo_draws_by_the_square_of_the_reward():
    algorithm = load(PolicyRunConfig, "recipes/presets/pf_ppo.yaml", []).config.algorithm
    assert (algorithm.advantage.name, algorithm.loss.name) == ("gae", "ppo")
    assert (algorithm.resample.scheme, algorithm.resample.power) == ("power", 2.0)


def test_what_is_held_out_is_never_trained_on():
    rows = resolve("recipes/presets/task.py:rows")
    train = {row["prompt"] for row in rows(1, 20000, "train")}
    held_out = {row["prompt"] for row in rows(2, 256, "held_out")}
    assert not train & held_out
    assert next(rows(1, 1, "train")) == {"prompt": "bggc", "ground_truth": "cggb"}


def test_right_letters_count_only_in_an_answer_of_the_right_length():
    right_letters = resolve("recipes/presets/task.py:right_letters")
    answers = {"abcde": 1.0, "abcdd": 0.8, "edcba": 0.2, "abcdef": 0.0, "abcd": 0.0, "": 0.0}
    assert {answer: round(right_letters(answer, "abcde", {}), 9) for answer in answers} == answers
