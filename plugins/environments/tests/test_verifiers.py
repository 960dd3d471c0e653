"""Environments of the package verifiers: of a small package with its interface, and of the package itself if there.

HONE_TEST_VERIFIERS_PYTHON names an interpreter that has verifiers and uv.
"""

import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hone.config import ConfigError, build
from hone.data.rendering import Renderer
from hone.data.settings import RowsConfig
from hone.data.sources.base import DataError, open_rows
from hone.envs.agents.program import Verdict
from hone.envs.episode import Play
from hone.envs.settings import EpisodeConfig
from hone.models.settings import BuildConfig
from hone.models.tokenizer import build_tokenizer
from hone.types import Completion, Prompt, PromptTooLong, SamplingParams, Status, StopReason
from hone_environments.verifiers.episodes import EpisodeFailed, VerifiersRunner, verdict_of
from tests.docs.blocks import ROOT, read_blocks

HERE = Path(__file__).parent / "stand_ins"
REAL = os.environ.get("HONE_TEST_VERIFIERS_PYTHON", "")
LANGUAGE = Renderer(build_tokenizer(BuildConfig()))
KINDS = ("", "dies", "no setup", "no score", "slow score")


@pytest.fixture(scope="module", params=["ours", "real"])
def python(request):
    """An interpreter that imports verifiers and the tasksets of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(HERE / "tasksets"), os.environ.get("PYTHONPATH", "")]
        if request.param == "ours":
            paths.insert(0, str(HERE / "verifiers_like"))
        elif not REAL:
            pytest.skip("HONE_TEST_VERIFIERS_PYTHON names no interpreter with the package verifiers")
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield REAL if request.param == "real" else ""


@pytest.fixture(scope="module")
def rows(python):
    source = {"name": "verifiers", "taskset": "second_guess", "python": python}
    return open_rows(build(RowsConfig, {"source": source}, "recipe.yaml"))


class Run:
    """A runner and the event loop on which it plays."""

    def __init__(self, rows, python, max_turns=3, **env):
        keys = {"name": "verifiers", "taskset": "second_guess", "python": python, **env}
        self._config = build(EpisodeConfig, {"env": keys, "max_turns": max_turns}, "recipe.yaml")
        self._rows = rows
        self._loop = asyncio.Runner()
        self._runner = VerifiersRunner(self._config, self._config.env, LANGUAGE)

    def play(self, answers, kind="", too_long_at=None):
        """The trajectories of two episodes in which the policy gives these answers, turn by turn."""

        async def policy(request):
            turn = int(request.id.rsplit("/", 1)[1])
            if turn == too_long_at:
                raise PromptTooLong("the conversation is too long")
            end = min(LANGUAGE.end_token_ids)
            ids = (*LANGUAGE.tokenizer.encode(answers[turn]), end)
            return Completion(request.id, ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)

        async def unscored(group):
            return group

        row = self._rows[KINDS.index(kind)]
        prompt = Prompt("set/0", (1,), tuple(row["messages"]), None, "set", row)
        how = Play(policy, SamplingParams(40, stop_token_ids=tuple(LANGUAGE.end_token_ids)), seed=0, samples=2)
        (group,) = self._loop.run(asyncio.wait_for(self._runner.run([prompt], how, unscored), 120))
        return group.trajectories

    def end(self):
        self._loop.run(self._runner.close())
        self._loop.close()


@pytest.fixture(scope="module")
def run(rows, python):
    running = Run(rows, python)
    yield running
    running.end()


def figures(trajectory):
    return {name.removeprefix("verifiers/"): metric.value for name, metric in trajectory.metrics.items()}


def test_its_tasks_are_rows(rows):
    assert [row["task"]["kind"] for row in (rows[0], rows[1], rows[2], rows[3], rows[4])] == list(KINDS)
    assert len(rows) == 5
    assert rows[1]["messages"] == [{"role": "system", "content": "c"}, {"role": "user", "content": "ab"}]
    assert (rows[1]["task"]["idx"], rows[1]["task"]["answer"], rows[1]["data_source"]) == (1, "d", "second_guess")


def test_its_agent_asks_the_policy_and_its_rewards_are_those_of_the_episode(run):
    once, again = run.play(["d"]), run.play(["a", "d"])
    assert [(one.status, one.turns, one.turn_reward) for one in once] == [(Status.OK, 1, 2.0)] * 2
    assert figures(once[0]) == {"reward/right": 2.0, "reward/late": 0.0, "turns": 1.0}
    assert [(one.status, one.turns, one.turn_reward) for one in again] == [(Status.OK, 2, 1.5)] * 2
    assert figures(again[0]) == {"reward/right": 2.0, "reward/late": -0.5, "turns": 2.0}
    assert [one.spans[-1].reward for one in again] == [1.5] * 2  # of the last turn


def test_what_the_policy_reads_is_what_the_environment_wrote(run):
    (trajectory, _) = run.play(["a", "d"])
    system, user = {"role": "system", "content": "c"}, {"role": "user", "content": "ab"}
    start = LANGUAGE.render_prompt([system, user])
    assert trajectory.token_ids[: len(start)] == start
    text = LANGUAGE.decode(trajectory.token_ids, keep_special=True)
    assert text.count("f") == 1
    assert text.index("f") > text.index("a", len(LANGUAGE.decode(start, keep_special=True)))


def test_the_environment_ends_an_episode_at_max_turns_and_scores_it(run):
    found = run.play(["a"] * 3)
    assert [(one.status, one.turns, one.turn_reward) for one in found] == [(Status.OK, 3, -0.5)] * 2


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("no setup", "TaskError.*the board is gone"),
        ("no score", "TaskError.*there is no judge"),
        ("slow score", r"the environment did not score the episode \(scoring_timeout\)"),
        ("dies", "ToolLost: the server verifiers second_guess is lost: it ended with exit status 3"),
    ],
)
def test_a_failure_of_the_environment_is_no_reward(run, kind, error):
    found = run.play(["d"], kind)
    assert {(one.status, one.turn_reward) for one in found} == {(Status.ENV_FAILED, 0.0)}
    assert all(re.search(error, one.error) for one in found), found[0].error
    assert [one.status for one in run.play(["d"])] == [Status.OK] * 2  # also after the process died


def test_a_request_that_is_too_long_is_the_policys_doing(run, python):
    found = run.play(["a", "a"], too_long_at=1)
    assert {one.turns for one in found} == {1}
    if python:  # its harness ends the conversation, and the environment scores it
        assert {(one.status, one.turn_reward) for one in found} == {(Status.OK, 0.0)}
    else:
        assert {one.status for one in found} == {Status.TRUNCATED}
        assert all("ProviderError" in one.error for one in found)


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"taskset": "no_such_taskset"}, "taskset no_such_taskset cannot be loaded: ModuleNotFoundError: "),
        ({"options": {"players": {}}}, "taskset second_guess cannot be loaded: ValidationError: (.|\n)*players"),
        ({"taskset": "two_players"}, "has the agents white, black; exactly one is the policy"),
        ({"start_timeout_s": 0.01}, r"not ready after 0.01 s \(episode.env.start_timeout_s\)"),
    ],
)
def test_what_cannot_be_played_is_an_error_before_the_run(rows, python, env, error):
    with pytest.raises(ConfigError, match=error):
        Run(rows, python, **env)


def test_an_interpreter_without_the_package_is_one_error(rows, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(ConfigError, match="taskset second_guess cannot be loaded: ModuleNotFoundError: No module"):
        Run(rows, sys.executable)
    with pytest.raises(ConfigError, match="no/python cannot be started: No such file or directory"):
        Run(rows, "no/python")


def test_a_row_of_another_source_is_one_error(run):
    prompt = Prompt("set/0", (1,), ({"role": "user", "content": "ab"},), None, "set", {})
    with pytest.raises(ConfigError, match=r"set/0: the row has no column task .* taskset: second_guess"):
        run._loop.run(run._runner.run([prompt], None, None))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ({"taskset": "no_such_taskset"}, "cannot be read: exit status 1; it printed:\n(.|\n)*no_such_taskset"),
        ({"taskset": "endless"}, "the taskset endless has no end; set source.size"),
        ({"taskset": "endless", "options": {"levels": 3}}, "cannot be read: exit status 1; it printed:\n(.|\n)*levels"),
        ({"taskset": "endless", "timeout_s": 0.01}, r"it was not ready after 0.01 s \(source.timeout_s\)"),
    ],
)
def test_tasks_that_cannot_be_read_are_one_error(python, source, error):
    config = build(RowsConfig, {"source": {"name": "verifiers", "python": python, **source}}, "recipe.yaml")
    with pytest.raises(DataError, match=rf"data.train: verifiers taskset {source['taskset']} (.|\n)*{error}"):
        open_rows(config)


def test_the_first_tasks_of_a_taskset_without_end(python):
    source = {"name": "verifiers", "python": python, "taskset": "endless", "size": 3}
    found = open_rows(build(RowsConfig, {"source": source}, "recipe.yaml"))
    assert [found[number]["messages"][0]["content"] for number in range(len(found))] == ["0", "1", "2"]


@pytest.mark.slow
def test_the_example_of_envs_md_trains(tmp_path, python):
    """The page's taskset and run file, with the interpreter of this test."""
    blocks = [one for one in read_blocks("docs/envs.md") if one.reason.endswith("test_verifiers.py")]
    by_language = {one.language: one for one in blocks}
    ((command,),) = [one.commands for one in blocks if one.commands]
    run_file = by_language["yaml"].text.replace(".venv-verifiers/bin/python", python or sys.executable)
    (tmp_path / "letters.py").write_text(by_language["python"].text, encoding="utf-8")
    (tmp_path / "letters.yaml").write_text(run_file, encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", *command.split()]
    done = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    with gzip.open(tmp_path / "runs/letters/rollouts.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    shares = [row["response"].count("a") / max(1, len(row["response"])) for row in rows]
    assert [row["reward"] for row in rows] == pytest.approx(shares)
    assert {row["status"] for row in rows} <= {"ok", "truncated"}  # by the token budget
    steps = map(json.loads, (tmp_path / "runs/letters/metrics.jsonl").read_text().splitlines())
    found = [(one["rollout/verifiers/reward/share"], one["reward/mean"]) for one in steps if one["step"] > 0]
    assert len(found) == 2
    assert [parts for parts, _ in found] == pytest.approx([mean for _, mean in found])


def test_the_outcome_of_an_episode():
    whole = {"reward": 1.5, "rewards": {"right": 1.5}, "metrics": {"turns": 2}}
    assert verdict_of(whole) == Verdict(None, 1.5, {"verifiers/turns": 2.0, "verifiers/reward/right": 1.5})
    assert verdict_of({"reward": None, "rewards": {}, "metrics": {}}) == Verdict()
    with pytest.raises(EpisodeFailed, match="verifiers/turns should be a finite number, found nan"):
        verdict_of({**whole, "metrics": {"turns": float("nan")}})
    with pytest.raises(EpisodeFailed, match="ProviderError: no") as found:
        verdict_of({"failure": "ProviderError: no", "status_code": 400})
    assert found.value.status_code == 400
