"""`hone check`: what it says of a run file, and its verdict on a model's first answers."""

import json
from pathlib import Path

import pytest
import yaml

from hone.cli.baseline import judged, measured, verdict
from hone.cli.main import main
from hone.cli.recipe import load_recipe
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup
from tests.trainers.tiny import BASE, recipe

BAD = Path(__file__).parents[1] / "envs" / "bad_envs.py"


def group(*rewards, text="a text", status=Status.OK):
    prompt = Prompt("set/1", (1,), ({"role": "user", "content": "?"},), None, "set")
    return TrajectoryGroup(
        prompt,
        tuple(
            Trajectory(
                prompt_id="set/1",
                sample=sample,
                token_ids=(1, 2),
                prompt_length=1,
                loss_mask=(0, 1),
                rollout_logprobs=(0.0, -0.5),
                weight_versions=(-1, 0),
                response=text,
                stop_reason=StopReason.STOP,
                status=status,
                reward=reward,
                components={"solved": float(reward >= 2.0)},
            )
            for sample, reward in enumerate(rewards)
        ),
    )


def test_the_figures_of_first_answers():
    greedy = [group(2.0), group(0.5), group(1.0), group(0.0)]
    sampled = [group(2.0, 0.0, 0.0, 2.0), group(0.5, 0.5, 0.5, 0.5), group(0.0, 1.0, 0.0, 0.0, status=Status.TRUNCATED)]
    for score, full in (("solved", 1.0), ("none", 2.0)):
        found = measured(greedy, sampled, score, full)
        assert (found.greedy, found.once, found.ever, found.samples) == (0.25, 2 / 12, 1 / 3, 4)
        assert (found.mixed, found.cut, found.empty, found.marked) == (2 / 3, 1 / 3, 0.0, 0.0)
    assert verdict(found) == "it can learn: 67% of the groups have different rewards"


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ([group(0.0, 0.0)], "too hard: hardly a group has different rewards"),
        ([group(2.0, 2.0)], "too easy: 100%"),
        (
            [group(0.0, 1.0, status=Status.TRUNCATED)],
            "no answer ended before the limit: either it is too low, or the m",
        ),
        ([group(0.0, 1.0, status=Status.TRUNCATED), group(0.0)], "cut off: 67%"),
        ([group(0.0, 1.0, text=" ")], "template wrong: 100% of the answers are empty"),
        ([group(0.0, 1.0, text="so<|im_end|>")], "template wrong: 100% of the answers have marks"),
        ([group(0.0, 2.0), group(0.0, 0.0), group(0.0, 1.0)], "sampling loses much: greedy answers are right in 100%"),
        ([group(1.0, 0.0, status=Status.REWARD_FAILED)], "no answer could be scored"),
    ],
)
def test_the_verdict_says_what_to_change(sampled, expected):
    assert verdict(measured([group(2.0)], sampled, "solved", 1.0)).startswith(expected)


def test_the_verdict_says_that_a_warm_start_comes_first(tmp_path):
    warm = "warm_start={data: {train: {path: rows.jsonl}}, steps: 7, samples_per_step: 1}"
    notes = [
        judged([group(2.0)], [group(0.0, 2.0)], load_recipe(recipe(tmp_path), more).config) for more in ([], [warm])
    ]
    assert [len(lines) for lines in notes] == [2, 3]
    assert "answers of the model before warm_start, whose 7 supervised steps" in notes[1][-1]


def test_a_run_file_is_tried_without_training(tmp_path, capsys, monkeypatch):
    path = recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    likeliest = ["rollout.sampling.temperature=1.0", "rollout.sampling.min_p=1.0"]  # so all answers are equal
    assert main(["check", str(path), *likeliest, "--baseline", "--prompts", "2"]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split(":", 1) for line in out.strip().splitlines())
    assert "prompts of" in lines["data"]
    assert "<user>" in lines["first prompt, as the model reads it"]
    (reward,) = [line for line in lines if line.startswith("reward ")]
    assert "for the ground truth as the answer" in lines[reward]
    assert "context 32 tokens" in lines["model"]
    assert "GiB at the most, in backward" in lines["memory"]
    assert lines["evaluation.sets.held_out"] == " 8 rows"
    assert "pass@4" in lines["before training"]
    assert "; 0% of the groups have different rewards" in lines["before training"]
    assert lines["verdict"]
    left = [one for one in tmp_path.rglob("*") if "__pycache__" not in one.parts]  # Python's own, of the task
    assert sorted(left) == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["algorithm.kl={coef: 0.1}", "reference.model.path=gone/away"],
            "reference.model.path 'gone/away' is not a local folder",
        ),
        (
            ["reward.components.rm={model: {path: gone/away}}"],
            "reward.components.rm.model.path 'gone/away' is not a local folder",
        ),
        (
            ["evaluation.sets.held_out.columns={prompt: question}"],
            "evaluation.sets.held_out.columns.prompt: unknown column",
        ),
        (["evaluation.sets.other.path=gone.jsonl"], "evaluation.sets.other.path: no file gone.jsonl"),
        (
            ["warm_start={data: {train: {path: gone.jsonl}}, steps: 1, samples_per_step: 1}"],
            "warm_start.data.train: no file gone.jsonl",
        ),
    ],
)
def test_every_model_and_set_that_is_named_has_to_be_there(tmp_path, capsys, settings, said):
    assert main(["check", str(recipe(tmp_path)), *settings]) == 2
    assert said in capsys.readouterr().err


def test_an_answer_that_a_prompt_leaves_no_room_for_is_told(tmp_path, capsys):
    assert main(["check", str(recipe(tmp_path)), "rollout.sampling.max_response_tokens=30"]) == 0
    said = capsys.readouterr().out
    assert "of an answer's 30 tokens, as the model's context is 32" in said
    assert "leaves" not in said.split("context is 32")[1]


def supervised(folder, kind, **columns):
    """A run file of a kind with three rows; the second one is longer than the context."""
    rows = [{name: text.replace("N", "ab" * count) for name, text in columns.items()} for count in (1, 20, 2)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "kind": kind,
        "run": {"dir": str(folder / "run"), "steps": 1},
        "model": BASE["model"],
        "data": {"train": {"path": str(data)}},
        "samples_per_step": 2,
    }
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize(
    ("kind", "columns", "learnt"),
    [
        ("sft", {"prompt": "ab", "completion": "Ncd"}, "abcd"),
        ("prefer", {"prompt": "ab", "chosen": "Nd", "rejected": "Nc"}, "abd"),
        ("reward_model", {"prompt": "ab", "chosen": "Nd", "rejected": "Nc"}, "abd"),
    ],
)
def test_rows_of_a_supervised_run_are_rendered_and_shown(tmp_path, capsys, kind, columns, learnt):
    path = supervised(tmp_path, kind, **columns)
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split(":", 1) for line in out.strip().splitlines())
    assert "3 rows; sequences of" in lines["data"]
    assert "longer than the model's context of 32: set data.train.max_sample_tokens=32" in lines["data"]
    assert "<user>" in lines["first sequence, as the model reads it"]
    assert learnt in lines["of it with a loss"]
    assert "<user>" not in lines["of it with a loss"]
    assert main(["check", str(path), "--baseline"]) == 2
    assert f"a run file of kind {kind} has none" in capsys.readouterr().err


def test_a_supervised_row_that_cannot_be_read_is_found(tmp_path, capsys):
    path = supervised(tmp_path, "sft", prompt="ab", answer="N")
    assert main(["check", str(path)]) == 2
    assert "completion" in capsys.readouterr().err


def test_a_reward_that_can_score_nothing_is_found(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def broken(response):\n    raise ValueError('no')\n")
    path = recipe(tmp_path, {"reward": {"components": {"x": {"reward": f"{tmp_path}/broken.py:broken"}}}})
    assert main(["check", str(path)]) == 1
    assert "failed (ValueError: no" in capsys.readouterr().out


def test_an_environment_that_cannot_be_made_is_found(tmp_path, capsys):
    (tmp_path / "play.py").write_text("class Play:\n    def act(self, move):\n        return ''\n")
    path = recipe(tmp_path, {"episode": {"env": {"name": "tools", "tools": f"{tmp_path}/play.py:Play"}}})
    assert main(["check", str(path)]) == 2
    assert "tool act: parameter move has no annotation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("Good", 0, "4 episodes of one prompt, 8 turns\nenvironment: no problem found\n"),
        ("Raises", 1, "environment: problem: "),
    ],
)
def test_an_environment_is_played(tmp_path, capsys, name, code, said):
    changes = {"episode": {"env": {"name": f"{BAD}:{name}"}}}
    assert main(["check", str(recipe(tmp_path, changes))]) == code
    assert said in capsys.readouterr().out


def test_a_start_that_cannot_be_rendered_is_a_problem_of_the_environment(tmp_path, capsys):
    (tmp_path / "odd.py").write_text(
        "from hone.envs.base import Start, StepResult\n"
        "class Odd:\n"
        "    def __init__(self, prompt, sample, config): pass\n"
        "    async def start(self): return Start(({'role': 'user', 'content': 5},))\n"
        "    async def step(self, said, completion): return StepResult(done=True)\n"
        "    async def close(self): pass\n"
    )
    assert main(["check", str(recipe(tmp_path, {"episode": {"env": {"name": f"{tmp_path}/odd.py:Odd"}}}))]) == 1
    out = capsys.readouterr().out
    assert "environment: problem: its first prompt cannot be rendered: the content of a message" in out
    assert "first prompt, as" not in out


def test_the_first_prompt_is_the_one_of_the_environment(capsys):
    assert main(["check", "recipes/tools/calculator.yaml"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("first prompt")]
    assert "<bos><system>mul<user>" in line  # the tool that the rows do not have


def test_the_line_of_figures(tmp_path):
    config = load_recipe(recipe(tmp_path)).config
    line, _ = judged([group(1.0)], [group(1.0, 0.0)], config)
    assert line.startswith("before training: greedy 100% right; sampled pass@1 50%, pass@2 100%; 100% of the groups")
