"""The other shipped run files: a few steps of each, at their own sizes where that takes seconds."""

import json
from pathlib import Path

import pytest
import torch

from hone.algorithms.settings import MtGrpoSettings
from hone.algorithms.turns import mt_grpo
from hone.cli.main import main
from hone.cli.recipe import load_recipe
from hone.data.packing import Sample
from hone.data.rendering import Renderer
from hone.data.settings import DatasetConfig, PythonSettings
from hone.data.stream import SampleMaker, read_all
from hone.envs.base import ToolResult
from hone.envs.search import Index
from hone.models.settings import BuildConfig
from hone.models.tokenizer import build_tokenizer
from hone.registry import resolve
from hone.trainers.policy.checks import check_settings, optimizer_steps
from hone.types import Batch, Prompt
from tests.sandboxes.available import skip_without
from tests.trainers.tiny import metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("runtime.threads=1", "tracking.trackers=[jsonl]")


@pytest.fixture(autouse=True)
def _where_the_recipes_are(monkeypatch):
    monkeypatch.chdir(ROOT)  # their paths are relative to the project


def started(command, recipe, folder, *overrides):
    assert main([command, f"recipes/{recipe}", f"run.dir={folder}/run", *SMALL, *overrides]) == 0
    return metrics(folder / "run")


RUNS = (path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "serve")
RECIPES = sorted(map(str, RUNS))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_for_ten_steps_as_it_is(recipe):
    """`run.steps=10` failed on warm-up steps: schedules scale with the steps of a run."""
    value_pretraining = ["critic.warmup_steps=1"] if recipe.endswith("vapo.yaml") else []
    config = load_recipe(Path(recipe), ["run.steps=10", "run.epochs=null", *value_pretraining]).config
    steps = optimizer_steps(config) if hasattr(config, "algorithm") else {"actor": 10}
    assert config.actor.schedule.warmup(steps["actor"]) <= steps["actor"]
    if recipe == "recipes/quickstart/grpo.yaml":
        check_settings(config)
        assert config.actor.schedule.warmup(steps["actor"]) == 1


@pytest.mark.slow
def test_ppo_on_reverse_trains_its_critic(tmp_path):
    pool = "evaluation.sets.held_out.source.size=16"
    steps = started("train", "reverse/ppo.yaml", tmp_path, "run.steps=2", "update.prompts_per_step=8", pool)
    assert steps[1]["critic/value_loss"] >= 0.0
    assert steps[1]["rollout/trajectories"] == 8 * 16
    engine = json.loads((tmp_path / "run/checkpoints/step_00000002/critic/engine.json").read_text())
    assert engine["schedule_step"] == 2 * 2


@pytest.mark.slow
def test_countdown_runs_from_its_warm_start_to_the_verifier(tmp_path):
    pytest.importorskip("reasoning_gym", reason="the recipe needs the extra `tasks`")
    small = ("run.steps=1", "update.prompts_per_step=4", "warm_start.steps=12", "warm_start.samples_per_step=4",
             "warm_start.actor.schedule.warmup_steps=2", "evaluation.sets.held_out.source.size=8")  # fmt: skip
    steps = started("train", "countdown/grpo.yaml", tmp_path, *small)
    assert steps[1]["reward/failed"] == 0
    assert steps[1]["reward/min"] >= 0.01  # the verifier's mark for text that is no expression
    assert steps[1]["reward/accuracy"] <= steps[1]["reward/verifier"]
    assert steps[0]["eval/held_out/accuracy"] <= steps[0]["eval/held_out/verifier"]


def test_countdown_counts_as_solved_what_uses_each_number_once():
    pytest.importorskip("reasoning_gym", reason="the recipe needs the extra `tasks`")
    solved = resolve("recipes/countdown/task.py:solved")
    entry = {"answer": "(2+3)*10", "question": "", "metadata": {"numbers": [10, 3, 2], "target": 50}}
    row = {"task": "countdown", "entry": entry}
    answers = {"10*(3+2)": 1.0, "(2+3)*10": 1.0, "10*3+2": 0.0, "25+25": 0.0, "10*(3+2": 0.0, "50": 0.0}
    assert {answer: solved(answer, "(2+3)*10", row) for answer in answers} == answers


@pytest.mark.slow
def test_fine_tuning_on_chats_learns_both_answers_and_nothing_else(tmp_path):
    steps = started("sft", "sft/chat.yaml", tmp_path, "run.steps=25", "evaluation.sets.held_out.source.size=32")
    assert steps[25]["eval/held_out/loss"] < 0.8 * steps[0]["eval/held_out/loss"]
    renderer = Renderer(build_tokenizer(BuildConfig(characters=" abcdefghijklmnopqrstuvwxyz")))
    config = DatasetConfig(source=PythonSettings(function="recipes/sft/task.py:rows", size=1, seed=1))
    ((sample,), _) = read_all(SampleMaker("train", config, renderer, "data.train"))
    assert isinstance(sample, Sample)
    text = renderer.decode(sample.token_ids, keep_special=True)
    learnt_ids = [token for token, learnt in zip(sample.token_ids, sample.loss_mask, strict=True) if learnt]
    answers = [part.split("<eos>")[0] + "<eos>" for part in text.split("<assistant>")[1:]]
    assert len(answers) == 2
    assert renderer.decode(learnt_ids, keep_special=True) == "".join(answers)


@pytest.mark.slow
def test_the_calculator_is_called_and_credit_goes_to_turns(tmp_path):
    small = ("run.steps=1", "warm_start.steps=3", "warm_start.samples_per_step=8", "update.prompts_per_step=2",
             "update.samples_per_prompt=4", "evaluation.sets.held_out.source.size=4")  # fmt: skip
    steps = started("train", "tools/calculator.yaml", tmp_path, *small)
    assert steps[1]["reward/failed"] == 0
    assert steps[1]["rollout/trajectories"] == 8


@pytest.mark.slow
def test_the_corpus_is_searched_by_its_recipe(tmp_path):
    small = ("run.steps=1", "warm_start.steps=3", "warm_start.samples_per_step=8", "update.prompts_per_step=2",
             "update.samples_per_prompt=4", "evaluation.sets.held_out.max_rows=4")  # fmt: skip
    steps = started("train", "search/local.yaml", tmp_path, *small)
    assert steps[1]["reward/failed"] == 0
    assert steps[1]["rollout/trajectories"] == 8


def test_every_question_of_the_search_recipe_takes_two_searches():
    corpus = list(resolve("recipes/search/task.py:corpus")(seed=1, size=1000))
    passages = [f"{one['title']}: {one['text']}" for one in corpus]
    index = Index(passages)
    questions = {split: list(resolve("recipes/search/task.py:rows")(1, 1000, split)) for split in ("train", "held_out")}
    assert {split: len(rows) for split, rows in questions.items()} == {"train": 300, "held_out": 100}
    for row in questions["train"] + questions["held_out"]:
        (first,) = index.best(row["prompt"], 2)
        person, _, town = passages[first].partition(": town ")
        (by_name, *_) = index.best(town, 1)  # the town's name alone finds the person again
        (second,) = index.best(f"{town} code", 1)
        assert (person, passages[by_name]) == (row["prompt"], passages[first])
        assert passages[second] == f"{town}: code {row['ground_truth'].removeprefix('=')}"


def test_worked_searches_search_twice_first_and_then_mostly_guess():
    worked = resolve("recipes/search/task.py:worked")
    rows = list(worked(2, 1000, 500, 0.3))
    searches = [sum(message["role"] == "tool" for message in row["messages"]) for row in rows]
    assert searches[:500] == [2] * 500
    assert 110 < searches[500:].count(2) < 190  # 0.3 of 500 is 150
    assert 40 < searches[500:].count(1) < 100  # a fifth of the other 350 is 70
    for row, count in zip(rows, searches, strict=True):
        said = [message["content"] for message in row["messages"]]
        assert (said[-1].removeprefix("=") in " ".join(said[:-1])) == (count == 2)  # else the answer is a guess
        assert len(said) == 2 + 2 * count


@pytest.mark.slow
def test_python_programs_run_in_a_sandbox(tmp_path):
    skip_without("landlock")
    small = ("run.steps=1", "warm_start.steps=12", "warm_start.samples_per_step=4", "update.prompts_per_step=2",
             "update.samples_per_prompt=4", "warm_start.actor.schedule.warmup_steps=2",
             "evaluation.sets.held_out.source.size=4")  # fmt: skip
    steps = started("train", "code/python.yaml", tmp_path, *small)
    assert steps[1]["reward/failed"] == 0
    assert steps[1]["reward/scored"] == 8
    assert steps[1]["reward/tests/program"] == 1.0  # each answer is a program, right or wrong


def test_every_solution_of_the_code_recipe_passes_its_tests():
    for split, names in {"train": set(), "held_out": set()}.items():
        for row in resolve("recipes/code/task.py:rows")(seed=3, size=400, split=split):
            defined = {}
            exec(row["solution"], defined)
            for test in row["ground_truth"]:
                exec(test, dict(defined))
            names.add(row["prompt"])
        assert len(names) > 100
    (row,) = resolve("recipes/code/task.py:rows")(seed=3, size=1, split="train")
    assert len(row["ground_truth"]) == 4


def test_the_calculator_rewards_its_first_call_by_the_right_digits():
    calculator = resolve("recipes/tools/task.py:Calculator")
    row = {"prompt": "1234*5678", "a": "1234", "b": "5678"}
    prompt = Prompt("train/0", (1,), (), "=7006652", "train", row)
    calls = {(1234, 5678): 1.0, (1234, 5679): 7 / 8, (1235, 567): 6 / 8, (12345, 5678): 0.0}
    for (a, b), reward in calls.items():
        assert calculator(prompt).mul(a, b) == ToolResult(str(a * b), reward=reward)
    one = calculator(prompt)
    assert [one.mul(1234, 5678).reward for _ in range(2)] == [1.0, 0.0]


def test_the_control_of_the_calculator_gives_each_turn_the_advantage_of_a_random_turn():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    batch = Batch(
        token_ids=torch.arange(12),
        position_ids=torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, 5, 7, 12]),
        group_index=torch.zeros(3, dtype=torch.int64),
        episode_index=torch.arange(3),
        rewards=torch.tensor([1.0, 0.0, 0.5]),
        token_rewards=torch.tensor([0, 0, 0.7, 0, 1, 0, 0, 0, 0, 0.2, 0, 0.5]),
    )
    firsts = torch.tensor([1, 4, 6, 8, 11])  # of the five turns
    settings = MtGrpoSettings()
    shuffled = resolve("recipes/tools/shuffled.py:shuffled")(batch, settings).advantages
    plain = mt_grpo(batch, settings).advantages
    assert sorted(shuffled[firsts].tolist()) == sorted(plain[firsts].tolist())
    assert shuffled[firsts].tolist() != plain[firsts].tolist()
    assert (shuffled[2], shuffled[9]) == (shuffled[1], shuffled[8])  # one value for all tokens of a turn
    assert not shuffled[~mask].any()


def test_worked_solutions_call_the_tool_first_and_then_mostly_guess():
    worked = resolve("recipes/tools/task.py:worked")
    roles = [[message["role"] for message in row["messages"]] for row in worked(2, 400, 200, 0.3)]
    called, guessed = ["user", "assistant", "tool", "assistant"], ["user", "assistant"]
    assert roles[:200] == [called] * 200
    assert 30 < roles[200:].count(called) < 90  # 0.3 of 200 is 60
    assert roles[200:].count(called) + roles[200:].count(guessed) == 200
