"""Episodes with NeMo Gym's resources servers: one of ours that speaks their HTTP, and one of the package if there.

HONE_TEST_NEMO_GYM_PYTHON names an interpreter that has nemo-gym.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hone.config import ConfigError, build
from hone.data.rendering import Renderer
from hone.envs.agents.program import Verdict
from hone.envs.base import ToolLost
from hone.envs.episode import Play
from hone.envs.settings import EpisodeConfig
from hone.models.settings import BuildConfig
from hone.models.tokenizer import build_tokenizer
from hone.types import Completion, Prompt, SamplingParams, Status, StopReason
from hone_environments.nemo_gym import NemoGymRunner, verdict_of
from tests.envs.listening import listening

SERVER = str(Path(__file__).parent / "stand_ins" / "nemo_gym_server.py")
PACKAGE = os.environ.get("HONE_TEST_NEMO_GYM_PYTHON", "")
LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyz_<>{}\":, -0123456789ATVN'()[].\n/"))
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "strict": True,
}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1, then 2"}], "tools": [TOOL]},
    "start": 3,
    "goal": 6,
}


class Language(Renderer):
    """The tiny tokenizer, which says that its template shows tools."""

    def renders_tools(self, messages, tools):
        return True


LANGUAGE = Language(build_tokenizer(BuildConfig(characters="".join(LETTERS))))


class Served:
    """A server process, and episodes with it."""

    def __init__(self, *arguments, python=sys.executable):
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.process = subprocess.Popen([python, SERVER, str(self.port), *arguments])
        asyncio.run(listening(self.port))

    def play(self, answers, row=ROW, max_turns=4, budget=400, **env):
        """The trajectories of two episodes in which the policy gives these answers, turn by turn."""
        keys = {"name": "nemo_gym", "url": f"http://127.0.0.1:{self.port}", "parser": "hermes", **env}
        config = build(EpisodeConfig, {"env": keys, "max_turns": max_turns}, "recipe.yaml")
        self.read = []

        async def policy(request):
            turn = int(request.id.rsplit("/", 1)[1])
            self.read.append(LANGUAGE.decode(request.tokens))
            ids = (*LANGUAGE.tokenizer.encode(answers[turn]), min(LANGUAGE.end_token_ids))[
                : request.sampling.max_tokens
            ]
            return Completion(request.id, ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)

        async def unscored(group):
            return group

        async def played():
            runner = NemoGymRunner(config, config.env, LANGUAGE)
            prompt = Prompt("set/0", (1,), tuple(row["responses_create_params"]["input"]), None, "set", row)
            how = Play(policy, SamplingParams(budget, stop_token_ids=tuple(LANGUAGE.end_token_ids)), seed=0, samples=2)
            try:
                return await asyncio.wait_for(runner.run([prompt], how, unscored), 60)
            finally:
                await runner.close()

        (group,) = asyncio.run(played())
        return group.trajectories

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module", params=["ours", "package"])
def server(request):
    if request.param == "package" and not PACKAGE:
        pytest.skip("HONE_TEST_NEMO_GYM_PYTHON names no interpreter with the package nemo-gym")
    served = Served() if request.param == "ours" else Served("package", python=PACKAGE)
    yield served
    served.end()


@pytest.fixture(scope="module")
def ours():
    served = Served()
    yield served
    served.end()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def outcomes(found):
    return [(one.status, one.turns, one.turn_reward) for one in found]


def figures(trajectory):
    return {name.removeprefix("nemo_gym/reward/"): metric.value for name, metric in trajectory.metrics.items()}


def test_calls_reach_the_session_of_their_episode_and_the_server_gives_the_reward(server):
    found = server.play([call("add", count=1), call("add", count=2), "done"])
    assert outcomes(found) == [(Status.OK, 3, 1.0)] * 2
    assert figures(found[0]) == {"right": 1.0, "calls": 2.0}
    assert sum('{"count":6}' in text.replace(" ", "") for text in server.read) == 2  # each counts from 3 by itself
    assert outcomes(server.play([call("add", count=1), "done"])) == [(Status.OK, 2, 0.0)] * 2


def test_what_the_policy_does_wrong_is_its_own_to_read(server):
    answers = [call("verify", reward=1), call("add", counts=1), "<tool_call>{</tool_call>"]
    assert outcomes(server.play(answers)) == [(Status.OK, 3, 0.0)] * 2
    assert any("there is no tool verify (there is: add)" in text for text in server.read)
    assert any('"detail"' in text for text in server.read)  # what FastAPI and the test's server call the reason


def test_an_episode_at_a_limit_is_verified(server):
    turns = server.play([call("add", count=1)] * 2, max_turns=2)
    assert outcomes(turns) == [(Status.OK, 2, 0.0)] * 2
    assert figures(turns[0])["calls"] == 2.0
    one = len(LANGUAGE.tokenizer.encode(call("add", count=3))) + 1
    spent = server.play([call("add", count=3), "done"], budget=one)
    assert outcomes(spent) == [(Status.OK, 1, 1.0)] * 2


@pytest.mark.parametrize(
    ("kind", "error"), [("masked", "could not verify: judge_failed: no judge"), ("no session", "/seed_session with")]
)
def test_a_failure_of_the_server_is_no_reward(server, kind, error):
    found = server.play(["done"], {**ROW, "kind": kind})
    assert {one.status for one in found} == {Status.ENV_FAILED}
    assert {one.turn_reward for one in found} == {0.0}
    assert all(error in one.error for one in found), found[0].error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("prose", "answered /verify with something else than JSON"),
        ("no number", "verified with reward = 'much', expected a finite number"),
    ],
)
def test_an_answer_outside_the_protocol_is_one_error(ours, kind, error):
    found = ours.play(["done"], {**ROW, "kind": kind})
    assert {one.status for one in found} == {Status.ENV_FAILED}
    assert all(error in one.error for one in found), found[0].error


def test_a_late_tool_is_the_policys_to_read_if_the_server_lives(ours):
    found = ours.play([call("add", count=-2), call("add", count=3), "done"], tool_timeout_s=0.2)
    assert outcomes(found) == [(Status.OK, 3, 1.0)] * 2
    assert any("add did not answer within 0.2 s" in text for text in ours.read)


def test_a_server_that_dies_gives_no_reward():
    mortal = Served()
    try:
        found = mortal.play([call("add", count=-1), "done"])
        assert {one.status for one in found} == {Status.ENV_FAILED}
        assert all("the NeMo Gym server at http://127.0.0.1:" in one.error for one in found)
        assert mortal.process.wait(60) == 3
        with pytest.raises(ConfigError, match=r"episode.env.url: the NeMo Gym server at .* cannot be reached"):
            mortal.play(["done"])
    finally:
        mortal.end()


def test_what_cannot_be_played_is_one_error(ours):
    with pytest.raises(ConfigError, match=r"url should be an address such as http://127.0.0.1:8000"):
        ours.play(["done"], url="ws://127.0.0.1:9")
    with pytest.raises(ConfigError, match="set/0: the row should have a column responses_create_params with an input"):
        ours.play(["done"], {"responses_create_params": {"input": ()}})


def test_the_outcome_of_an_episode():
    assert verdict_of({"reward": True}, "here") == Verdict(reward=1.0)
    parts = {"reward": 0.5, "reward_components": {"a": 1, "b": 0}}
    assert verdict_of(parts, "here") == Verdict(
        reward=0.5, metrics={"nemo_gym/reward/a": 1.0, "nemo_gym/reward/b": 0.0}
    )
    with pytest.raises(ToolLost, match="the NeMo Gym server at here could not verify: mask_sample: no reason given"):
        verdict_of({"reward": 0.0, "mask_sample": True}, "here")
    with pytest.raises(ToolLost, match="verified with reward = nan"):
        verdict_of({"reward": float("nan")}, "here")
