"""Games of TextWorld: of a small package with its interface, and of the package itself if there.

HONE_TEST_TEXTWORLD_PYTHON names an interpreter that has textworld.
"""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.config import ConfigError, build
from hone.envs.base import ToolLost
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.types import Completion, Prompt, Status, StopReason
from hone_environments.textworld import GameFailed, TextWorldEnv, command_in

LIKE = Path(__file__).parent / "stand_ins" / "textworld_like"
REAL = os.environ.get("HONE_TEST_TEXTWORLD_PYTHON", "")
NOTHING = Completion("x", (), (), (), StopReason.STOP)
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play."}


@pytest.fixture
def games(tmp_path, monkeypatch):
    """Two games, and `textworld` for hone's own interpreter."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(LIKE), os.environ.get("PYTHONPATH", "")]))
    for name, walkthrough in (("attic", ["go up", "open box"]), ("cellar", ["go down"])):
        (tmp_path / name).write_text(json.dumps({"name": name, "walkthrough": walkthrough}))
    return [str(tmp_path / "attic"), str(tmp_path / "cellar")]


def made(games, **env):
    return build(EpisodeConfig, {"env": {"name": "textworld", "games": games, **env}}, "recipe.yaml")


def asked(**row):
    return Prompt("set/0", (1,), (SYSTEM, USER), None, "set", row)


def play(config, *plays):
    """What each play saw, one after another with the same games: [(row, answers)] -> [(start, results, error)]."""

    async def all_of_them():
        shared = TextWorldEnv.for_run(config)
        found = []
        try:
            for row, answers in plays:
                env, results, error = shared(asked(**row), 0, config), [], None
                start = await env.start()
                for answer in answers:
                    try:
                        results.append(await env.step(Said(answer), NOTHING))
                    except (ToolLost, GameFailed) as failure:
                        error = failure
                await env.close()
                found.append((start, results, error))
        finally:
            await shared.close()
        return found

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


def test_a_game_from_its_first_text_to_its_last_point(games):
    config = made(games, show_commands=True)
    ((start, results, _),) = play(config, ({"seed": 2}, ["go up", "dance", "I think so.\n\n> open box \n"]))
    first = "Welcome to attic.\n\nYou look.\n\nCommands: look, go up"
    assert start.messages == (SYSTEM, {"role": "user", "content": f"Play.\n\n{first}"})
    assert start.anchor == first
    assert [one.messages[0]["content"] for one in results] == [
        "Done.\n\nYou look.\n\nCommands: look, open box",
        "That's not a verb I recognise.\n\nYou look.\n\nCommands: look, open box",
        "Done.\n\nYou look.",
    ]
    assert [one.reward for one in results] == [0.5, 0.0, 0.5]
    assert [one.done for one in results] == [False, False, True]


def test_the_row_or_its_seed_chooses_the_game(games):
    rows = ({"seed": 2}, {"seed": 3}, {"seed": 2, "game": games[1]})
    names = [start.anchor.split()[2] for start, _, _ in play(made(games), *((row, []) for row in rows))]
    assert names == ["attic.", "cellar.", "cellar."]


def test_an_answer_without_a_command_is_refused_and_then_ends_the_episode(games):
    ((_, results, _),) = play(made(games, max_bad_calls=2), ({}, ["\n ", "a" * 201]))
    assert results[0].messages[0]["content"] == "There is no command in '\\n '. Expected: one command in the last line."
    assert [one.status for one in results] == [Status.OK, Status.TRUNCATED]
    assert [one.reward for one in results] == [None, None]
    assert command_in("x" * 200) == "x" * 200


def test_a_process_that_dies_or_hangs_is_lost_and_the_next_game_starts_another(games):
    config = made(games, step_timeout_s=1.0)
    dead, hung, failed, fine = play(config, ({}, ["die"]), ({}, ["hang"]), ({}, ["raise"]), ({"seed": 3}, ["go down"]))
    assert isinstance(dead[2], ToolLost)
    assert "it ended with exit status 3" in str(dead[2])
    assert isinstance(hung[2], ToolLost)
    assert "did not answer within 1 s (episode.env.step_timeout_s)" in str(hung[2])
    assert isinstance(failed[2], GameFailed)
    assert "ValueError: no such thing" in str(failed[2])
    assert [one.reward for one in fine[1]] == [1.0]


def test_what_cannot_be_played_is_an_error_before_the_first_episode(games, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"episode.env.games: .*none.z8 does not exist; make one with tw-make"):
        TextWorldEnv.for_run(made([*games, str(tmp_path / "none.z8")]))
    (tmp_path / "broken").write_text("no game")
    with pytest.raises(ConfigError, match=r"TextWorld cannot play .*JSONDecodeError.*"):
        TextWorldEnv.for_run(made([str(tmp_path / "broken")]))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(
        ConfigError, match=r"No module named 'textworld'.*set episode.env.python to one that has textworld"
    ):
        TextWorldEnv.for_run(made(games))


def test_env_check_plays_a_walkthrough(games, capsys):
    row = json.dumps({"prompt": "Play.", "seed": 2, "walkthrough": ["go up", "open box"]})
    assert main(["env", "check", "textworld", "--row", row, f"episode.env.games=[{games[0]}]"]) == 0
    assert "scripted policy: 2 done\nrandom policy: 2 not done\nno problem found" in capsys.readouterr().out


@pytest.mark.skipif(not REAL, reason="HONE_TEST_TEXTWORLD_PYTHON names no interpreter with the package textworld")
def test_a_game_of_textworlds_maker(tmp_path, capsys):
    game = tmp_path / "game.z8"
    make = [
        str(Path(REAL).parent / "tw-make"),
        "custom",
        "--world-size",
        "2",
        "--quest-length",
        "3",
        "--nb-objects",
        "4",
    ]
    subprocess.run([*make, "--seed", "1", "--output", str(game)], check=True, timeout=300, capture_output=True)
    walkthrough = json.loads(game.with_suffix(".json").read_text())["metadata"]["walkthrough"]
    config = made([str(game)], python=REAL, show_commands=True)
    ((start, results, _),) = play(config, ({}, ["sing", *walkthrough]))
    assert "-= Studio =-" in start.anchor
    assert start.anchor.partition("\n")[0].startswith("Welcome to")
    assert "0/1" not in start.anchor
    assert "Commands: drop glass, " in start.anchor
    assert "not a verb I recognise" in results[0].messages[0]["content"]
    assert [one.reward for one in results] == [0.0, 0.0, 0.0, 1.0]
    assert [one.done for one in results] == [False, False, False, True]
    row = json.dumps({"prompt": "Play.", "walkthrough": walkthrough})
    keys = [f"episode.env.games=[{game}]", f"episode.env.python={REAL}"]
    assert main(["env", "check", "textworld", "--row", row, *keys]) == 0
    assert "scripted policy: 2 done\nrandom policy: 2 not done\nno problem found" in capsys.readouterr().out
