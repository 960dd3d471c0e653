"""Conversations of several turns end where the models that train on them end: at the smallest token budget."""

import json

import pytest

from hone.config import ConfigError, load, setting
from hone.envs import ENVS
from hone.envs.base import Start, StepResult
from hone.envs.settings import EnvSettings
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.checks import TokenBudgets
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from hone.types import GenerationRequest, PromptTooLong, SamplingParams
from tests.trainers.tiny import recipe

BUDGET = 24


class Insists:
    """Asks three times, with a message of nine tokens each; the answer of a turn has three at most."""

    def __init__(self, prompt, sample, settings):
        self.prompt, self.turns = prompt, 0

    async def start(self):
        return Start(messages=self.prompt.messages)

    async def step(self, said, completion):
        self.turns += 1
        return StepResult(done=self.turns == 3, messages=({"role": "user", "content": "abcdabcd"},))

    async def close(self):
        pass


class InsistsSettings(EnvSettings):
    name: str = setting("insists", "asks three times")


@pytest.fixture(autouse=True)
def insists(monkeypatch):
    monkeypatch.setattr(ENVS, "_entries", dict(ENVS._entries))
    ENVS.register("insists", Insists, InsistsSettings)


def config(folder, *overrides, **env):
    changes = {
        "episode": {"env": {"name": "insists", "max_turn_tokens": 3, **env}},
        "rollout": {"sampling": {"max_response_tokens": 9}},
        "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
    }
    return load(
        PolicyRunConfig,
        recipe(folder, changes),
        [f"actor.max_tokens_per_microbatch={BUDGET}", "run.steps=2", *overrides],
    )


def test_a_conversation_that_outgrows_a_token_budget_is_truncated_and_trained(tmp_path):
    run_policy(config(tmp_path))
    lines = [json.loads(line) for line in rollout_lines(tmp_path / "run" / "rollouts.jsonl.gz")]
    trained = [one for one in lines if one["set"] is None]
    lengths = [len(one["prompt_token_ids"]) + len(one["token_ids"]) for one in trained]
    assert len(trained) == 32
    assert max(lengths) <= BUDGET
    cut = [one for one in trained if one["status"] == "truncated"]
    assert len(cut) > 16
    assert {one["stop_reason"] for one in cut} == {"length"}
    assert all(one["rollout_logprobs"][-1] is not None for one in cut), "an answer is the end, and no observation"


def test_a_longer_conversation_than_a_budget_is_not_allowed(tmp_path):
    said = rf"actor\.max_tokens_per_microbatch = {BUDGET} is less than episode\.env\.max_episode_tokens \(25\)"
    with pytest.raises(ConfigError, match=said):
        run_policy(config(tmp_path, max_episode_tokens=BUDGET + 1))
    assert TokenBudgets(config(tmp_path, max_episode_tokens=BUDGET).config).longest == BUDGET


TEACHERS = {
    "built-in": ({"builtin": {"max_sequence_tokens": 20}}, "builtin.max_sequence_tokens", 20),
    "vllm": ({"backend": "vllm", "engine": {"max_model_len": 20}}, "engine.max_model_len", 19),
    "vllm, no limit": ({"backend": "vllm", "engine": {"max_model_len": -1}}, None, BUDGET),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_that_a_rollout_engine_serves_has_a_budget(name, tmp_path):
    rollout, key, longest = TEACHERS[name]
    teacher = {"model": {"path": "teacher"}, "served_by": "rollout", "rollout": rollout}
    text = json.dumps({"teachers": {"a": teacher}})
    budgets = TokenBudgets(config(tmp_path, f"distillation={text}").config)
    assert budgets.longest == longest
    with pytest.raises(ConfigError, match=rf"a\.rollout\.{key} = 20" if longest == 20 else f"= {longest} is less"):
        budgets.check(16, "it")


def test_only_answers_of_the_policy_are_limited():
    def fitted(sampling, prompt):
        return GenerationRequest("r", (7,) * prompt, sampling).fitted().sampling

    limited = SamplingParams(max_tokens=6, max_sequence_tokens=10)
    assert fitted(limited, 4) == SamplingParams(max_tokens=6)
    assert fitted(limited, 7) == SamplingParams(max_tokens=3)
    with pytest.raises(
        PromptTooLong, match="'r' has a prompt of 10 tokens, which leaves no room in sequences of at most 10"
    ):
        fitted(limited, 10)
    other = SamplingParams(max_tokens=6, max_sequence_tokens=10, adapter="opponent")
    assert fitted(other, 99) == SamplingParams(max_tokens=6, adapter="opponent")
    scored = SamplingParams(max_tokens=0, max_sequence_tokens=10, prompt_logprobs=0)
    assert fitted(scored, 99) == SamplingParams(max_tokens=0, prompt_logprobs=0)
