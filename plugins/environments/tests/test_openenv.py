"""Environments of OpenEnv servers: real server processes by WebSocket, whole episodes, and servers that fail.

The server of the tests speaks the protocol of openenv-core 0.3. Where HONE_TEST_OPENENV_PYTHON names an interpreter
that has this package, most tests also run with its server.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from openenv_server import A_LIST, BYTES, DIES, HANGS, HUGE, NO_DONE, NO_REWARD, PROSE, RAISES

from hone.cli.main import main
from hone.config import ConfigError, build
from hone.envs.base import ToolLost
from hone.envs.episode import EpisodeRunner, Play
from hone.envs.settings import EpisodeConfig
from hone.envs.text_codec import TextCodec
from hone.envs.tool_calls import Said, no_calls
from hone.types import Completion, Prompt, SamplingParams, Status, StopReason
from hone_environments import openenv
from hone_environments.openenv import OpenEnv, action_in, observed
from tests.envs.language import Language
from tests.envs.listening import listening

SERVER = str(Path(__file__).parent / "stand_ins" / "openenv_server.py")
CORE = os.environ.get("HONE_TEST_OPENENV_PYTHON", "")
NOTHING = Completion("x", (), (), (), StopReason.STOP)


PROMPT = Prompt("set/0", (1,), ({"role": "user", "content": "Find it."},), None, "set", {"seed": 4})


class Served:
    """A server process, and environments of its episodes."""

    def __init__(self, *arguments, python=sys.executable, sessions=4):
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}/ws"
        self.process = subprocess.Popen([python, SERVER, str(self.port), str(sessions), *arguments])
        asyncio.run(listening(self.port))

    def config(self, **env):
        keys = {"name": "openenv", "url": self.url, "observation_field": "text", **env}
        return build(EpisodeConfig, {"env": keys}, "recipe.yaml")

    def made(self, **env):
        """What makes environments, after the check of the server."""
        config = self.config(**env)
        shared = OpenEnv.for_run(config)
        return lambda: shared(PROMPT, 0, config)

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def ours():
    server = Served()
    yield server
    server.end()


@pytest.fixture
def mortal():
    """A server that a test may kill."""
    server = Served()
    yield server
    server.end()


@pytest.fixture(scope="module", params=["ours", "core"])
def server(request):
    if request.param == "ours":
        yield request.getfixturevalue("ours")
        return
    if not CORE:
        pytest.skip("HONE_TEST_OPENENV_PYTHON names no interpreter with the package openenv-core")
    server = Served("core", python=CORE)
    yield server
    server.end()


async def play(env, *answers):
    try:
        start = await env.start()
        return start, [await env.step(Said(one), NOTHING) for one in answers]
    finally:
        await env.close()


def guess(number):
    return f'{{"guess": {number}}}'


def test_a_game_with_its_rewards(server):
    start, results = asyncio.run(play(server.made()(), guess(7), f"I try:\n```json\n{guess(2)}\n```", guess(4)))
    assert start.messages == ({"role": "user", "content": "Find it.\n\nguess"},)
    assert [one.messages[0]["content"] for one in results] == ["lower", "higher", "right"]
    assert [(one.reward, one.done) for one in results] == [(0.0, False), (0.0, False), (1.0, True)]
    assert [start.anchor, *(one.anchor for one in results)] == ["guess", "lower", "higher", "right"]
    assert results[2].answer == guess(4)


def test_an_answer_may_be_one_field_and_an_observation_is_read_whole_by_default(server):
    make = server.made(action_field="guess", observation_field=None, reset={"text": "début"})
    if server.process.args[-1] == "core":  # pydantic reads a number in a text
        start, (result,) = asyncio.run(play(make(), "4"))
        assert (result.done, result.reward) == (True, 1.0)
    else:
        start, (result,) = asyncio.run(play(make(), "4"))
        assert result.messages[0]["content"].startswith("The environment refused this action: guess: ")
    assert start.messages[0]["content"] == 'Find it.\n\n{"text": "début"}'


def test_a_bad_action_is_the_policys_to_read_and_ends_the_episode_when_repeated(server):
    answers = ("seven", "[7]", '{"gues": 7}', guess(4))
    _, (prose, a_list, wrong, right) = asyncio.run(play(server.made(max_bad_calls=3)(), *answers))
    said = [one.messages[0]["content"] for one in (prose, a_list, wrong)]
    assert said[0].startswith("This is no action: expected one JSON object with the fields of an action (Expecting")
    assert said[1] == "This is no action: expected one JSON object with the fields of an action, found [7]."
    assert said[2].startswith("The environment refused this action: guess: Field required")
    assert [one.status for one in (prose, a_list, wrong)] == [Status.OK, Status.OK, Status.TRUNCATED]
    assert right.done  # refusals did not disturb the session


def test_an_environment_that_raises_is_a_failure(server):
    with pytest.raises(ToolLost, match="failed in step: EXECUTION_ERROR: the game is broken"):
        asyncio.run(play(server.made()(), guess(RAISES)))


def test_each_episode_has_a_session_and_waits_for_one_where_they_are_few(server):
    make = server.made(max_sessions=4)

    async def many():
        return await asyncio.gather(*(play(make(), guess(number % 10), guess(4)) for number in range(12)))

    played = asyncio.run(many())
    assert [results[0].done for _, results in played] == [number % 10 == 4 for number in range(12)]
    assert all(results[1].done for _, results in played)


def test_a_server_without_room_says_so(server):
    make = server.made()

    async def five():
        envs = [make() for _ in range(5)]
        for env in envs[:4]:
            await env.start()
        try:
            await envs[4].start()
        finally:
            for env in envs:
                await env.close()

    with pytest.raises(ToolLost, match=r"refused reset: CAPACITY_REACHED: .*; set episode.env.max_sessions"):
        asyncio.run(five())
    assert asyncio.run(play(make(), guess(4)))[1][0].done


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (PROSE, "answered step with something else: Expecting value"),
        (A_LIST, r"expected an object with type and data, found \[1\]"),
        (NO_REWARD, "reward should be a finite number or null, found 'much'"),
        (NO_DONE, "done should be true or false, found 'perhaps'"),
        (BYTES, r"ended the connection in step: \(BINARY\)"),
        (HUGE, "ended the connection in step: .*exceeds limit"),
    ],
)
def test_an_answer_outside_the_protocol_is_one_error(ours, number, error):
    with pytest.raises(ToolLost, match=f"the OpenEnv server at ws://.*{error}"):
        asyncio.run(play(ours.made()(), guess(number)))


def test_a_late_step_is_the_policys_if_the_server_lives(server):
    _, (result,) = asyncio.run(play(server.made(step_timeout_s=0.2)(), guess(HANGS)))
    assert (result.status, result.done) == (Status.TRUNCATED, False)
    assert result.error == "the environment did not answer this action within 0.2 s"


def test_a_server_that_stops_or_dies_is_a_failure(mortal, monkeypatch):
    monkeypatch.setattr(openenv, "PING_S", 0.2)
    impatient, make = mortal.made(step_timeout_s=0.2), mortal.made(step_timeout_s=60)

    async def stopped():
        env = impatient()
        await env.start()
        os.kill(mortal.process.pid, signal.SIGSTOP)
        try:
            await env.step(Said(guess(4)), NOTHING)
        finally:
            os.kill(mortal.process.pid, signal.SIGCONT)
            await env.close()

    with pytest.raises(ToolLost, match=r"did not answer step within 0.2 s, nor a ping within 0.2 s"):
        asyncio.run(stopped())
    with pytest.raises(ToolLost, match="ended the connection in step"):
        asyncio.run(play(make(), guess(DIES)))
    assert mortal.process.wait(60) == 3
    with pytest.raises(ToolLost, match="cannot be reached: ClientConnectorError"):
        asyncio.run(play(make()))


@pytest.mark.parametrize(("dies", "status"), [(False, Status.OK), (True, Status.ENV_FAILED)])
def test_a_server_killed_in_an_episode_gives_no_reward(mortal, dies, status):
    config = mortal.config(retries=1)

    async def policy(request):
        turn = int(request.id.rsplit("/", 1)[1])
        if dies and turn == 1:
            mortal.end()
        ids = tuple(map(ord, guess([2, 4][turn])))
        return Completion(request.id, ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)

    async def unscored(group):
        return group

    runner = EpisodeRunner(config, OpenEnv.for_run(config), TextCodec(Language(), no_calls))
    played = Play(policy, SamplingParams(max_tokens=100), seed=0, samples=1)
    (group,) = asyncio.run(runner.run([PROMPT], played, unscored))
    (trajectory,) = group.trajectories
    assert trajectory.status is status
    if dies:
        assert "ToolLost: the OpenEnv server at ws://" in trajectory.error
        assert "cannot be reached" in trajectory.error  # it was played again
    else:
        assert [span.reward for span in trajectory.spans] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"url": "http://127.0.0.1:8000"}, "url should be the address of a WebSocket, such as ws://127.0.0.1:8000/ws"),
        ({"url": "ws://127.0.0.1:9/ws"}, "the OpenEnv server at ws://127.0.0.1:9/ws cannot be reached"),
        ({"observation_field": "board"}, r"observation_field: the observation has no field 'board' \(it has: text\)"),
        ({"reset": {"level": 3}}, "refused reset|ended the connection in reset"),
    ],
)
def test_what_cannot_be_played_is_an_error_before_the_run(ours, env, error):
    with pytest.raises(ConfigError, match=f"env.*{error}"):
        ours.made(**env)


@pytest.mark.parametrize(
    ("text", "action"), [(' {"a": 1} ', {"a": 1}), ('so: ```{"a": [2]}```', {"a": [2]}), ("{}", {})]
)
def test_an_action_is_a_json_object(text, action):
    assert action_in(text, None) == action
    assert action_in(text, "message") == {"message": text}


@pytest.mark.parametrize("text", ['{"a": 1} {"a": 2}', "[" * 100, '"a"', "", "NaN", '{"a": 1'])
def test_other_text_is_no_action(text):
    with pytest.raises(ValueError, match=r"expected one JSON object|nested deeper"):
        action_in(text, None)


def test_a_missing_reward_is_none_and_a_boolean_is_a_number():
    message = {"type": "observation", "data": {"observation": {}, "reward": None}}
    assert (observed(message).reward, observed(message).done) == (None, False)
    message["data"]["reward"] = True
    assert observed(message).reward == 1.0
    message["data"]["reward"] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        observed(message)


def test_it_passes_the_check_of_environments(server, capsys):
    assert main(["env", "check", "openenv", f"episode.env.url={server.url}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problem found"
