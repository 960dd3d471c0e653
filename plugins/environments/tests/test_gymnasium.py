"""Gymnasium environments as text: a walk with literal observations and rewards, seeds, actions, errors."""

import asyncio

import gymnasium
import pytest

from hone.cli.main import main
from hone.config import ConfigError, build
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.types import Completion, Prompt, Status, StopReason
from hone_environments.gymnasium import GymnasiumEnv, action_in

NOTHING = Completion("x", (), (), (), StopReason.STOP)
WALK = {"id": "FrozenLake-v1", "options": {"render_mode": "ansi", "is_slippery": False}}
NAMES = ["left", "down", "right", "up"]


def made(prompt_id="set/0", row=None, **env):
    config = build(EpisodeConfig, {"env": {"name": "gymnasium", **env}}, "recipe.yaml")
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Walk to G."})
    return GymnasiumEnv.for_run(config)(Prompt(prompt_id, (1,), messages, None, "set", row or {}), 0, config)


async def play(env, *answers):
    start = await env.start()
    results = [await env.step(Said(answer), NOTHING) for answer in answers]
    await env.close()
    return start, results


def test_a_walk_over_the_frozen_lake():
    env = made(**WALK, actions=NAMES)
    answers = ["right", "I think right, no: Right.", "down", "down", "DOWN", "right"]
    start, results = asyncio.run(play(env, *answers))
    assert start.messages[0] == {"role": "system", "content": "Be brief."}
    assert start.messages[1] == {"role": "user", "content": "Walk to G.\n\n0\n[S]FFF\nFHFH\nFFFH\nHFFG"}
    assert start.anchor == "0\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert results[0].messages == ({"role": "user", "content": "1\n(Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"},)
    assert [one.reward for one in results] == [0.0] * 5 + [1.0]
    assert [one.done for one in results] == [False] * 5 + [True]
    assert [one.anchor.split("\n")[0] for one in results] == ["1", "2", "6", "10", "14", "15"]


def test_an_answer_without_an_action_gets_the_list_and_then_ends_the_episode():
    _, results = asyncio.run(play(made(**WALK, actions=NAMES, max_bad_calls=2), "jump", "upwards"))
    assert results[0].messages[0]["content"] == "There is no action in 'jump'. Expected: left, down, right, up."
    assert [one.status for one in results] == [Status.OK, Status.TRUNCATED]
    assert [one.reward for one in results] == [None, None]
    _, (result,) = asyncio.run(play(made(**WALK), "up"))
    assert result.messages[0]["content"].endswith("Expected: a number from 0 to 3.")


@pytest.mark.parametrize(
    ("text", "names", "action"),
    [
        ("2", [], 2),
        ("first 1, then 3", [], 3),
        ("-2", [], None),
        ("12", [], None),
        ("4", [], None),
        ("", [], None),
        ("go UP!", NAMES, 3),
        ("upper", NAMES, None),
        ("turn left-up", ["left", "left-up", "a", "b"], 1),
    ],
)
def test_the_last_action_that_a_text_states_counts(text, names, action):
    assert action_in(text, gymnasium.spaces.Discrete(4), names) == action


def test_numbers_begin_where_the_space_begins():
    space = gymnasium.spaces.Discrete(3, start=-1)
    assert [action_in(text, space, []) for text in ("-1", "1", "2")] == [-1, 1, None]
    assert action_in("b", space, ["a", "b", "c"]) == 0


def numbers(**prompt):
    """The guesses that are right, found by trying all: each prompt has one."""
    env = made(id="gym_envs:Guess-v0", **prompt)
    _, results = asyncio.run(play(env, *map(str, range(100))))
    return [number for number, one in enumerate(results) if one.done]


def test_the_prompt_decides_the_seed():
    assert len(numbers()) == 1
    assert numbers() == numbers()
    assert numbers(row={"seed": 7}) == numbers(prompt_id="set/1", row={"seed": 7})
    assert len({*numbers(prompt_id="set/1"), *numbers(prompt_id="set/2"), *numbers(prompt_id="set/3")}) > 1


def test_a_text_action_is_the_whole_answer():
    _, (refused, wrong) = asyncio.run(play(made(id="gym_envs:Guess-v0"), "seven", "100"))
    assert refused.messages[0]["content"] == "There is no action in 'seven'. Expected: a text of 1 to 5 characters."
    assert (wrong.messages[0]["content"], wrong.reward) == ("wrong", 0.0)


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLak-v1 cannot be made: .*FrozenLake"),
        ({"id": "FrozenLake-v1", "options": {"depth": 3}}, "FrozenLake-v1 cannot be made: .*depth"),
        ({"id": "gym_envs:Steering-v0"}, "which no text names; expected a Discrete or a Text space"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "actions has 1 names; the actions are Discrete"),
        ({"id": "gym_envs:Guess-v0", "actions": ["a"]}, "has 1 names; the actions are Text"),
    ],
)
def test_what_cannot_be_played_is_an_error_before_the_run(env, error):
    with pytest.raises(ConfigError, match=f"episode.env.*{error}"):
        made(**env)


def test_it_passes_the_check_of_environments(capsys):
    keys = ["episode.env.id=FrozenLake-v1", "episode.env.actions=[left, down, right, up]"]
    assert main(["env", "check", "gymnasium", *keys]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problem found"
