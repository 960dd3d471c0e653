"""Odd ends of an asynchronous run: data that end, steps without an update, answers without an end, a signal."""

import asyncio
import os
import signal

import pytest

from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.envs import ENVS
from hone.envs.base import Start, StepResult
from hone.registry import Entry
from hone.schedule.journal import JOURNAL, read_journal
from hone.tracking.base import Interrupted
from hone.trainers.run.context import RunControl
from hone.trainers.run.launch import run_policy
from tests.trainers.test_asynchronous import AHEAD
from tests.trainers.tiny import metrics, recipe

pytestmark = pytest.mark.slow

NOT_EVALUATED = {**AHEAD, "run": {**AHEAD["run"], "steps": 4}, "evaluation": {}, "checkpoint": {"every_steps": 9}}
STALE_2 = {"asynchrony": {"staleness": 2}}
SHORT_DRAIN = {"asynchrony": {"staleness": 1, "drain_timeout_s": 2.0}}
ROWS = """
def rows(seed, size):
    for number in range(size):
        yield {"prompt": "abcd"[number % 4] + "ab", "ground_truth": "ba" + "abcd"[number % 4], "number": number}

def judge(response, ground_truth, row, same=()):
    return 0.5 if row["number"] in same else float(len(response)) + response.count("a") / 9
"""


class Endless:
    """One turn, which does not end for the row whose number is in `rows`."""

    rows = ()

    def __init__(self, prompt, sample, settings):
        self.messages, self.number = prompt.messages, prompt.row["number"]

    async def start(self):
        return Start(self.messages)

    async def step(self, said, completion):
        if self.number in self.rows:
            await asyncio.Event().wait()
        return StepResult(True)

    async def close(self):
        pass


@pytest.fixture(autouse=True)
def endless(monkeypatch):
    """`endless(3)`: the answers to row 3 do not end."""
    monkeypatch.setitem(ENVS._entries, "endless", Entry(Endless))
    return lambda *rows: monkeypatch.setattr(Endless, "rows", rows)


def prepare(folder, *changes, size=64, same=()):
    """A run file whose rows come in their order, so that row n is draw n; the rewards of `same` are equal."""
    task = folder / "rows.py"
    task.write_text(ROWS)
    inputs = {
        "data": {"shuffle": False, "train": {"source": rows(folder, size)}},
        "reward": {"workers": 1, "components": {"x": {"reward": f"{task}:judge", "options": {"same": list(same)}}}},
    }
    return recipe(folder, NOT_EVALUATED, inputs, *changes)


def rows(folder, size):
    return {"name": "python", "function": f"{folder / 'rows.py'}:rows", "size": size, "seed": 1}


def train(path, control=None):
    """The journal of a run, and the age of the oldest token in each step with an update."""
    run = run_policy(load_recipe(path), control)
    stale = [line.get("schedule/staleness_max") for line in metrics(run)[1:]]
    return list(read_journal(run / JOURNAL)), stale


def sampled_from(record):
    """Draw -> the versions of its tokens."""
    return {
        int(draw): {version for answer in answers for version, _ in answer} for draw, answers in record["spans"].items()
    }


def test_with_its_last_epoch_the_run_ends_and_every_prompt_that_was_drawn_is_trained(tmp_path):
    records, stale = train(prepare(tmp_path, {"run": {"steps": None, "epochs": 1.0}, **STALE_2}, size=18))
    assert [len(record["admitted"]) for record in records] == [12, 4, 4, 0, 0], "five steps, and nothing for a sixth"
    assert [number for record in records for number in record["taken"]] == list(range(20))
    assert stale == [0, 1, 2, 2, 2]


def test_steps_whose_groups_are_all_filtered_make_no_version_and_nobody_waits_for_one(tmp_path):
    """Steps 2 and 3 make no update, so the answers of step 4, of version 1, are as fresh as those of a first step."""
    algorithm = {**AHEAD["algorithm"], "dynamic_sampling": {"max_draws": 1}}
    records, stale = train(prepare(tmp_path, {"algorithm": algorithm, "run": {"steps": 5}}, same=range(4, 12)))
    assert [record["version"] for record in records] == [0, 1, 1, 1, 4]
    assert [set.union(*sampled_from(record).values()) for record in records] == [{0}, {0}, {1}, {1}, {1}]
    assert stale == [0, None, None, 0, 1]


def test_a_prompt_whose_answers_do_not_end_is_dropped_with_its_reason_and_nothing_gets_older(tmp_path, endless):
    endless(5)
    records, stale = train(prepare(tmp_path, {"episode": {"env": "endless", "timeout_s": 3.0}, **STALE_2}))
    dropped = [record["dropped"] for record in records]
    assert dropped == [{}, {"5": "train/5: not finished after 3 s, waiting for the environment"}, {}, {}]
    assert [record["taken"] for record in records] == [[*range(n, n + 4)] for n in range(0, 16, 4)]
    assert stale == [0, 1, 2, 2]


def test_an_evaluation_waits_longer_than_any_episode_takes(tmp_path, endless):
    endless(5)
    for name in "ab":
        (tmp_path / name).mkdir()
    held_out = {"every_steps": 1, "sets": {"held_out": {"source": rows(tmp_path / "b", 2)}}}
    settings = {**SHORT_DRAIN, "evaluation": held_out}
    with pytest.raises(ConfigError, match=r"drain_timeout_s = 2 is not longer than episode.timeout_s = 3: .*s=4.5"):
        train(prepare(tmp_path / "a", {"episode": {"env": "endless", "timeout_s": 3.0}, **settings}))
    records, _ = train(prepare(tmp_path / "b", {"episode": {"env": "endless", "timeout_s": 1.0}, **settings}))
    assert [list(record["dropped"]) for record in records] == [[], ["5"], [], []]


def test_after_a_signal_the_open_answers_are_saved_or_at_the_deadline_written_again(tmp_path, endless):
    """Draw 6 has no end before the signal: it is answered again, from the weights of the checkpoint."""
    endless(6)
    path = prepare(tmp_path, {"episode": {"env": "endless"}, **SHORT_DRAIN, "run": {"steps": 3}})

    def stop(step, figures):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="after step 1"):
        train(path, RunControl(on_step=stop))
    endless()
    records, stale = train(path)
    assert [record["taken"] for record in records] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert sampled_from(records[1]) == {4: {0}, 5: {0}, 6: {1}, 7: {0}}
    assert stale == [0, 1, 1]
