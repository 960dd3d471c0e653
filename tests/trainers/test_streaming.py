"""`asynchrony.stream`: a mini-batch trains before the later groups of its step are there, and nothing else changes."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from hone.cli.training import train as command
from hone.config import ConfigError, load
from hone.envs import ENVS
from hone.envs.base import Start, StepResult
from hone.registry import Entry
from hone.schedule.journal import JOURNAL, read_journal
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.streaming import StreamingTrainer
from hone.trainers.run.launch import run_policy
from tests.trainers.test_asynchronous import AHEAD, assert_same, repeatable
from tests.trainers.tiny import metrics, recipe

STREAMED = {
    **AHEAD,
    "run": {**AHEAD["run"], "steps": 4},
    "update": {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 2},
    "asynchrony": {"staleness": 1, "stream": True},
}
WHOLE = {**STREAMED, "asynchrony": {"staleness": 1, "stream": False}}
ROWS = """
def rows(seed, size):
    for number in range(size):
        yield {"prompt": "abcd"[number % 4] + "ab", "ground_truth": "ba" + "abcd"[number % 4], "number": number}

def sound(response, ground_truth, row, fails):
    if row["number"] in fails:
        raise ValueError("planted")
    return 0.0
"""


class Gate:
    """One turn, which ends for the rows of `waits` when the file of events has the line that stands there."""

    events, waits = Path(), {}

    def __init__(self, prompt, sample, settings):
        self.messages, self.number = prompt.messages, prompt.row["number"]

    async def start(self):
        return Start(self.messages)

    async def step(self, said, completion):
        if (line := self.waits.get(self.number)) is not None:
            async with asyncio.timeout(100):
                while line not in noted(self.events):
                    await asyncio.sleep(0.01)
            note(self.events, f"row {self.number} ended")
        return StepResult(True)

    async def close(self):
        pass


def note(events, line):
    with events.open("a") as out:
        out.write(f"{line}\n")


def noted(events):
    return events.read_text().splitlines() if events.is_file() else []


@contextmanager
def gate(folder, waits=()):
    """The environment `gate`; each early mini-batch is noted among the events when it has been trained."""
    train_early = StreamingTrainer.train_early

    def train_and_note(self, step, groups, unrecorded):
        train_early(self, step, groups, unrecorded)
        note(folder / "events", f"trained half of step {step}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVS._entries, "gate", Entry(Gate))
        patch.setattr(Gate, "events", folder / "events")
        patch.setattr(Gate, "waits", dict(waits))
        patch.setattr(StreamingTrainer, "train_early", train_and_note)
        yield


def prepare(folder, settings, *changes, fails=()):
    """A run file whose rows come in their order, so that row n is draw n; the rewards of `fails` cannot be scored."""
    folder.mkdir(parents=True, exist_ok=True)
    task = folder / "rows.py"
    task.write_text(ROWS)
    components = {
        "share": {"reward": f"{folder / 'task.py'}:share"},
        "sound": {"reward": f"{task}:sound", "options": {"fails": list(fails)}},
    }
    rows = {"source": {"name": "python", "function": f"{task}:rows", "size": 64, "seed": 1}}
    inputs = {
        "data": {"shuffle": False, "train": rows},
        "episode": {"env": "gate"},
        "evaluation": {},
        "reward": {"workers": 1, "components": components},
    }
    return recipe(folder, settings, inputs, *changes)


def train(path, waits=(), *overrides):
    with gate(path.parent, waits):
        return run_policy(load(PolicyRunConfig, path, list(overrides)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(prepare(tmp_path_factory.mktemp("whole"), WHOLE))


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """The answers to the last prompt of step 1 end after its first mini-batch has been trained."""
    folder = tmp_path_factory.mktemp("streamed")
    return train(prepare(folder, STREAMED), {3: "trained half of step 1"})


def lines(run):
    return [json.loads(line) for line in (run / JOURNAL).read_text().splitlines()]


def rollouts(run):
    found = [json.loads(line) for line in rollout_lines(run / "rollouts.jsonl.gz")]
    return [{name: value for name, value in line.items() if name != "logprob_gap"} for line in found]


def assert_streaming_changes_nothing(whole, streamed):
    assert repeatable(whole) == repeatable(streamed)
    assert rollouts(whole) == rollouts(streamed)
    assert list(read_journal(whole / JOURNAL)) == list(read_journal(streamed / JOURNAL))
    name = "export/model.safetensors"
    assert (whole / name).read_bytes() == (streamed / name).read_bytes()


def test_the_first_half_of_a_step_trains_before_the_second_has_ended(streamed):
    assert noted(streamed.parent / "events")[:5] == ["trained half of step 1", *["row 3 ended"] * 4]
    assert not any(line["reward/failed"] for line in metrics(streamed)[1:])


def test_the_journal_has_a_line_for_each_mini_batch(streamed):
    found = lines(streamed)
    assert [(line["step"], line["taken"]) for line in found[:4]] == [(1, [0, 1]), (1, [2, 3]), (2, [4, 5]), (2, [6, 7])]
    assert [line.get("more", False) for line in found] == [True, False] * 4
    assert ["batch" in line for line in found] == [False, True] * 4
    assert [len(line["admitted"]) for line in found] == [8, 0, 4, 0, 4, 0, 0, 0]


@pytest.mark.slow
def test_streaming_changes_no_bit(whole, streamed):
    assert_streaming_changes_nothing(whole, streamed)
    assert [line["schedule/staleness_max"] for line in metrics(streamed)[1:]] == [0, 1, 1, 1]
    assert all(line["train/grad_norm"] > 0 for line in metrics(streamed)[1:])


@pytest.mark.slow
def test_dropped_groups_are_replaced_and_mini_batches_stay_the_same(tmp_path):
    """Groups of equal rewards: a step has as many draws as it needs for two mini-batches of two kept groups."""
    change = {"algorithm": {**AHEAD["algorithm"], "dynamic_sampling": {"max_draws": 8}}}
    fails = [1, 6, 7]  # a failed group is replaced, too
    whole = train(prepare(tmp_path, WHOLE, change, fails=fails))
    streamed = train(prepare(tmp_path, STREAMED, change, fails=fails), (), f"run.dir={tmp_path / 'streamed'}")
    assert_streaming_changes_nothing(whole, streamed)
    for line in lines(streamed):
        assert len(line["taken"]) - len(line["dropped"]) == 2
    reasons = {reason.partition(" ")[0] for line in lines(streamed) for reason in line["dropped"].values()}
    assert reasons >= {"sound:", "reward"}, reasons


@pytest.mark.slow
def test_a_step_that_stays_short_has_a_smaller_last_mini_batch(tmp_path):
    """Draws 1 and 4 fail and nothing replaces them: step 1 trains 0 and 2, then 3; step 2 trains 5 and 6, then 7."""
    run = train(prepare(tmp_path, STREAMED, {"run": {"steps": 2}}, fails=[1, 4]))
    assert [line["taken"] for line in lines(run)] == [[0, 1, 2], [3], [4, 5, 6], [7]]
    assert [list(line["dropped"]) for line in lines(run)] == [["1"], [], ["4"], []]


@pytest.mark.slow
def test_a_run_that_is_killed_between_two_mini_batches_ends_as_one_that_is_not(whole, tmp_path):
    """In step 3, after the checkpoint of step 2: the answers to draw 11 wait for a line that the test writes later."""
    path, run, events = prepare(tmp_path, STREAMED), tmp_path / "run", tmp_path / "events"
    call = f"from tests.trainers.test_streaming import Path, train; train(Path({str(path)!r}), {{11: 'go'}})"
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", call], stdout=out, stderr=out, cwd=Path(__file__).parents[2])
        try:
            deadline = time.monotonic() + 90
            while "trained half of step 3" not in noted(events):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        finally:
            process.kill()
    assert lines(run)[-1]["taken"] == [8, 9]
    assert [record["step"] for record in read_journal(run / JOURNAL)] == [1, 2]
    note(events, "go")
    train(path)
    assert_streaming_changes_nothing(whole, run)
    assert [line["step"] for line in lines(run)] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.slow
def test_a_streamed_run_is_replayed_and_its_record_fits_a_run_without_streaming(streamed, tmp_path):
    with gate(tmp_path):
        command([str(streamed)], replay=streamed / JOURNAL)
    assert_same(streamed, streamed.with_name("run-replay"))
    other = tmp_path / "run"
    with gate(tmp_path):
        command([str(streamed), "asynchrony.stream=false", f"run.dir={other}"], replay=streamed / JOURNAL)
    assert_streaming_changes_nothing(other, streamed)


ALGORITHM = STREAMED["algorithm"]
NEEDS_ALL = {
    "nothing is ahead": ({"asynchrony": {"stream": True}}, r"set asynchrony\.staleness=1"),
    "two epochs": ({"update": {**STREAMED["update"], "epochs": 2}}, r"set update\.epochs=1"),
    "one mini-batch": ({"update": {**STREAMED["update"], "minibatches": 1}}, r"set update\.minibatches=2 or more"),
    "old log-probs": ({"algorithm": {}}, r"set algorithm\.correction\.old=rollout"),
    "whitening": (
        {"algorithm": {**ALGORITHM, "advantage": "reinforce_pp"}},
        r"algorithm\.advantage: reinforce_pp: its advantages depend on all groups",
    ),
    "the batch's deviation": (
        {"algorithm": {**ALGORITHM, "advantage": {"name": "grpo", "scale_by": "batch"}}},
        r"grpo with scale_by group or none",
    ),
    "resampling": ({"algorithm": {**ALGORITHM, "resample": {}}}, r"set algorithm\.resample=null"),
    "a reference": ({"algorithm": {**ALGORITHM, "kl": {"coef": 0.1}}}, r"reference .*algorithm\.kl\.coef=0"),
    "a reward model here": (
        {"reward": {"components": {"judge": {"model": {"path": "judge"}}}}},
        r"reward\.components\.judge\.model\.place: colocated.* set its place=process",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS_ALL)
def test_refused_because_it_needs_the_whole_step(name, tmp_path):
    change, message = NEEDS_ALL[name]
    with pytest.raises(ConfigError, match=rf"asynchrony\.stream with .*{message}.*, or asynchrony\.stream=false"):
        run_policy(load(PolicyRunConfig, recipe(tmp_path, STREAMED, change)))
