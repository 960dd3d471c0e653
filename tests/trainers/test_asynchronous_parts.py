"""Every part of a run works with answers that are generated ahead: each in a short run with staleness 1."""

import json

import pytest

from hone.cli.recipe import load_recipe
from hone.envs import ENVS
from hone.envs.base import Start, StepResult
from hone.models.settings import BuildConfig, ModelConfig
from hone.registry import Entry
from hone.schedule.journal import JOURNAL, read_journal
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.run.launch import run_policy
from hone.trainers.run.run_model import local_model
from tests.trainers.test_asynchronous import AHEAD
from tests.trainers.test_reward_models import export
from tests.trainers.tiny import BASE, PPO, metrics, recipe

pytestmark = pytest.mark.slow

STEPS = 3
SHORT = {**AHEAD, "run": {**AHEAD["run"], "steps": STEPS}, "evaluation": {}, "checkpoint": {"every_steps": 9}}
PROGRAM = """
from openai import AsyncOpenAI

async def twice(base_url, api_key, prompt):
    said = list(prompt.messages)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            found = await client.chat.completions.create(model="policy", messages=said, max_tokens=2)
            said += [{"role": "assistant", "content": found.choices[0].message.content or ""}]
            said += [{"role": "user", "content": "a"}]
    return said[-2]["content"]
"""


class Again:
    """Asks a second time."""

    def __init__(self, prompt, sample, settings):
        self.messages = prompt.messages
        self.turns = 0

    async def start(self):
        return Start(self.messages)

    async def step(self, said, completion):
        self.turns += 1
        return StepResult(self.turns == 2, () if self.turns == 2 else ({"role": "user", "content": "a"},))

    async def close(self):
        pass


@pytest.fixture(autouse=True)
def again(monkeypatch):
    """The environment of that name, for these tests only."""
    monkeypatch.setitem(ENVS._entries, "again", Entry(Again))


def train(folder, *changes):
    """The run folder, and the metrics of its steps. Every token has its version, and none is too old."""
    path = recipe(folder, SHORT, *changes)
    kind = next((change["kind"] for change in changes if "kind" in change), "rl")
    run = run_policy(load_recipe(path, kind=kind))
    records = list(read_journal(run / JOURNAL))
    assert [number for record in records for number in record["taken"]] == list(range(4 * STEPS))
    assert [number for record in records for number in record["admitted"]] == list(range(4 * STEPS))
    steps = metrics(run)[1:]
    stale = [line["schedule/staleness_max"] for line in steps]
    if any(change.get("asynchrony", {}).get("new_weights", "finish") != "finish" for change in changes):
        assert stale[0] == 0
        assert max(stale) <= 1  # how far an answer is when new weights arrive depends on the load
    else:
        assert stale == [0, 1, 1]
    return run, steps


def test_a_critic_a_reference_and_several_mini_batches(tmp_path):
    algorithm = {**PPO["algorithm"], "correction": {"old": "rollout"}}
    _, steps = train(tmp_path, PPO, {"algorithm": algorithm})
    for name in ("critic/loss", "train/reference_kl"):
        assert all(name in line for line in steps), sorted(steps[0])
    assert abs(steps[0]["train/reference_kl"]) < 1e-6 < steps[2]["train/reference_kl"]


@pytest.mark.parametrize("served_by", ["engine", "rollout"])
def test_a_teacher(tmp_path, served_by):
    build = BuildConfig(**{**BASE["model"]["build"], "seed": 5})
    teacher = local_model(ModelConfig(build=build), tmp_path / "teacher").path
    teachers = {"a": {"model": {"path": str(teacher)}, "served_by": served_by}}
    _, steps = train(tmp_path, {"kind": "distill", "distillation": {"teachers": teachers}})
    assert all(abs(line["train/teacher_kl"]) > 1e-3 for line in steps)  # an estimate from samples: of either sign


def test_a_reward_model(tmp_path):
    model = {"path": str(export(tmp_path / "judge")), "place": "colocated", "compute_dtype": "float32"}
    run, _ = train(tmp_path, {"reward": {"components": {"preferred": {"model": model}}, "workers": 1}})
    lines = [json.loads(line) for line in rollout_lines(run / "rollouts.jsonl.gz")]
    assert len(lines) == 16 * STEPS
    assert len({line["reward"] for line in lines}) > 4


def two_turns(run):
    lines = [json.loads(line) for line in rollout_lines(run / "rollouts.jsonl.gz")]
    assert {line["status"] for line in lines} <= {"ok", "truncated"}
    assert sum(line["turns"] == 2 for line in lines) > 16
    return lines


@pytest.mark.parametrize("mode", ["finish", "recompute", "keep_cache"])
def test_episodes_of_several_turns(tmp_path, mode):
    again = {
        "episode": {"env": {"name": "again", "max_turn_tokens": 2}},
        "rollout": {**AHEAD["rollout"], "sampling": {"max_response_tokens": 6}},
        "asynchrony": {"staleness": 1, "new_weights": mode},
    }
    run, _ = train(tmp_path, again)
    lines = two_turns(run)
    if mode == "finish":
        assert all(len(line["weight_versions"]) == 1 for line in lines)


@pytest.mark.parametrize("mode", ["finish", "recompute", "keep_cache"])
def test_agent_programs(tmp_path, mode):
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    agent = {
        "episode": {"env": {"name": "agent", "program": f"{program}:twice"}},
        "rollout": {**AHEAD["rollout"], "sampling": {"max_response_tokens": 6}},
        "asynchrony": {"staleness": 1, "new_weights": mode},
    }
    train(tmp_path, agent)
