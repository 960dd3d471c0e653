"""Environments, rewards, trackers, data sources and platforms with a fault each: their suites find it."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hone.testing
from hone.data.sources.base import ListRows
from hone.envs import ENVS
from hone.envs.base import Start, StepResult
from hone.platforms.cpu import CpuPlatform
from hone.testing import (
    Contract,
    EnvironmentContract,
    PlatformContract,
    RewardContract,
    SourceContract,
    TrackerContract,
)
from hone.tracking.base import FINISHED, Tracker
from tests.testing.faults import failures

HERE = Path(__file__).resolve()


def test_every_suite_can_be_imported_from_the_package_and_says_what_it_checks():
    for name in hone.testing.__all__:
        found = getattr(hone.testing, name)
        if isinstance(found, type) and issubclass(found, Contract):
            checks = dict(found.checks())
            assert found is Contract or checks
            assert all(title and title != method for method, title in checks.items()), checks
    with pytest.raises(AttributeError, match="did you mean 'RewardContract'"):
        hone.testing.RewardContrac  # noqa: B018


# ------------------------------------------------------------------------------------------------------ environments


class Guess:
    """The policy finds a number: three turns at most."""

    secret = 4

    def __init__(self, prompt, sample, settings):
        self.turns = 0

    async def start(self):
        return Start(messages=({"role": "user", "content": "Guess."},))

    async def step(self, said, completion):
        self.turns += 1
        right = said.content.strip() == str(self.secret)
        message = {"role": "user", "content": self.says()}
        return StepResult(done=right or self.turns == 3, messages=(message,), reward=float(right))

    def says(self):
        return "no"

    async def close(self):
        return None


class Shares(Guess):
    """Counts the turns of all episodes together."""

    async def start(self):
        type(self).turns = 0
        del self.turns
        return await super().start()

    async def step(self, said, completion):
        type(self).turns += 1
        self.__dict__["turns"] = type(self).turns
        return await super().step(said, completion)


class Forgets(Guess):
    """Needs `start` before `close`."""

    async def start(self):
        self.open = True
        return await super().start()

    async def close(self):
        assert self.open


class Worthless(Guess):
    async def step(self, said, completion):
        result = await super().step(said, completion)
        return StepResult(done=result.done, messages=result.messages, reward=0.0)


class Later(Guess):
    secret = 5


class Varies(Guess):
    def says(self):
        return f"no {random.random()}"


class Raises(Guess):
    async def step(self, said, completion):
        int(said.content)
        return await super().step(said, completion)


class Counts(Guess):
    """Its figures are numbers instead of metrics."""

    async def step(self, said, completion):
        return replace(await super().step(said, completion), metrics={"turns": 1})


@pytest.fixture
def registered(monkeypatch):
    """The environment classes of this file, under their names."""
    monkeypatch.setattr(ENVS, "_entries", dict(ENVS._entries))
    for cls in (Guess, Shares, Forgets, Worthless, Later, Varies, Raises, Counts):
        ENVS.register(cls.__name__, cls)


def suite_of(cls):
    class Suite(EnvironmentContract):
        rows = ({"prompt": "Guess.", "ground_truth": "4"},)
        answers = ("2", "4")
        rewards = (0.0, 1.0)

        def make(self):
            return cls.__name__

    return Suite


@pytest.mark.parametrize(
    ("cls", "checks"),
    [
        (Guess, set()),
        (Shares, {"test_episodes_do_not_see_each_other"}),
        (Forgets, {"test_an_episode_can_be_closed_before_its_first_step"}),
        (Worthless, {"test_the_answers_end_the_episode"}),
        (Later, {"test_the_answers_end_the_episode"}),
        (Varies, {"test_episodes_do_not_see_each_other"}),
        (Raises, {"test_scripted_and_random_policies_find_no_problem"}),
        (Counts, {"test_scripted_and_random_policies_find_no_problem", "test_the_answers_end_the_episode"}),
    ],
)
def test_an_environment_with_a_fault_fails_the_check_of_it(cls, checks, registered):
    found = failures(suite_of(cls))
    assert found.keys() == checks, found
    if cls is Counts:
        wrong = "metrics['turns'] is 1; expected hone.types.Metric.mean(...)"
        assert found["test_the_answers_end_the_episode"] == f"turn 1: {wrong}"
    if cls is Worthless:
        assert found.popitem()[1] == "the turns have rewards [0.0, 0.0], expected [0.0, 1.0]"


# ---------------------------------------------------------------------------------------------------------- rewards


def equal(response, ground_truth, row):
    return float(response.strip() == ground_truth)


def number(response, ground_truth, row):
    return float(float(response) == float(ground_truth))


COUNT = itertools.count()


def drifts(response, ground_truth, row):
    return float(response.strip() == ground_truth) + next(COUNT) * 1e-9


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("equal", {}),
        ("number", {"test_odd_answers_have_a_reward": "the answer '' failed: reward: ValueError: could not convert"}),
        ("drifts", {"test_the_same_answer_is_worth_the_same": "'4' was worth 1.0 first, and 1.000000001 later"}),
    ],
)
def test_a_reward_with_a_fault_fails_the_check_of_it(name, checks):
    class Suite(RewardContract):
        cases = (("4", "4", 1.0), ("5", "4", 0.0))

        def make(self):
            return f"{HERE}:{name}"

    found = failures(Suite)
    assert found.keys() == checks.keys(), found
    assert all(found[check].startswith(said) for check, said in checks.items()), found


def test_a_reward_of_the_wrong_size_is_not_that_of_the_case():
    class Suite(RewardContract):
        cases = (("4", "4", 0.5),)

        def make(self):
            return f"{HERE}:equal"

    assert failures(Suite, "test_the_cases_have_their_rewards") == {
        "test_the_cases_have_their_rewards": "the answer '4' to '4' is worth 1.0, expected 0.5"
    }


# --------------------------------------------------------------------------------------------------------- trackers

KILLED = "a_killed_run_keeps_what_was_flushed"


class Lines(Tracker):
    """A line of JSON for each step; a resumed run removes those that it writes again."""

    keeps_nan = cuts = True

    def __init__(self, run):
        self._path = run.run_dir / "lines.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.where = str(self._path)
        lines = self._path.read_text().splitlines() if self._path.exists() and run.resumed_from is not None else []
        kept = [line for line in lines if json.loads(line)[0] <= run.resumed_from or not self.cuts]
        self._path.write_text("".join(f"{line}\n" for line in kept))

    def log(self, step, values):
        values = {name: value for name, value in values.items() if self.keeps_nan or value == value}
        with self._path.open("a") as file:
            print(json.dumps([step, values]), file=file)


class DropsNan(Lines):
    keeps_nan = False


class Repeats(Lines):
    cuts = False


class Buffers(Lines):
    """Writes at the end, whatever `flush` asks for."""

    def __init__(self, run):
        super().__init__(run)
        self._kept = []

    def log(self, step, values):
        self._kept.append((step, values))

    def close(self, outcome=FINISHED):
        for step, values in self._kept:
            super().log(step, values)


class Shouts(Lines):
    def message(self, text):
        text.encode("ascii")


@pytest.mark.parametrize(
    ("cls", "checks"),
    [
        (Lines, {}),
        (DropsNan, {"every_metric_of_every_step_is_there", "a_resumed_run_continues_its_record", KILLED}),
        (Repeats, {"a_resumed_run_continues_its_record"}),
        (Buffers, {KILLED}),
        (Shouts, {"everything_a_run_sends_is_taken"}),
    ],
)
def test_a_tracker_with_a_fault_fails_the_check_of_it(cls, checks):
    class Suite(TrackerContract):
        def make(self, run):
            return cls(run)

        def read(self, folder):
            return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]

    found = failures(Suite)
    assert found.keys() == {f"test_{check}" for check in checks}
    if cls is Repeats:
        (said,) = found.values()
        assert said.startswith("step 3 has eval/sort/mean@4, perf/tokens, reward/mean, train/kl twice: remove"), said


# ----------------------------------------------------------------------------------------------------- data sources


class Endless(ListRows):
    def __getitem__(self, index):
        return super().__getitem__(index % len(self))


class Shuffled(ListRows):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "drawn": next(COUNT)}


class Nowhere(ListRows):
    def where(self, index):
        return self.place


class Blocks(ListRows):
    blocks = (2, 2)


@pytest.mark.parametrize(
    ("cls", "checks"),
    [
        (ListRows, set()),
        (Endless, {"test_an_index_beyond_the_end_is_refused"}),
        (Shuffled, {"test_rows_are_the_same_in_any_order_and_when_opened_again"}),
        (Nowhere, {"test_rows_have_places_of_their_own"}),
        (Blocks, {"test_blocks_cover_the_set"}),
    ],
)
def test_a_source_with_a_fault_fails_the_check_of_it(cls, checks):
    class Suite(SourceContract):
        def make(self):
            return cls([{"prompt": str(n)} for n in range(5)], "five rows")

    assert failures(Suite).keys() == checks


def test_columns_that_are_not_there_are_named():
    class Suite(SourceContract):
        def make(self):
            return ListRows([{"q": "a"}, {"q": "b"}], "two rows", {"prompt": "question"})

    assert failures(Suite) == {
        "test_columns_lead_to_columns": "columns names ['question'], but the first row has ['q']"
    }


# -------------------------------------------------------------------------------------------------------- platforms


class FullCpu(CpuPlatform):
    def memory(self, index=0):
        facts = super().memory(index)
        return type(facts)(facts.total, facts.total + 1, facts.allocated, facts.reserved, facts.peak)


class Unseeded(CpuPlatform):
    def set_rng_state(self, states):
        torch.manual_seed(0)


class NoHalf(CpuPlatform):
    dtypes = ("float32", "int4")


class Boastful(CpuPlatform):
    sources = {"speed": "the vendor's leaflet"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("cls", "checks"),
    [
        (CpuPlatform, set()),
        (FullCpu, {"test_memory_facts"}),
        (Unseeded, {"test_random_state"}),
        (NoHalf, {"test_dtypes"}),
        (Boastful, {"test_facts_have_sources"}),
    ],
)
def test_a_platform_with_a_fault_fails_the_check_of_it(cls, checks):
    class Suite(PlatformContract):
        def make(self):
            return cls()

    assert failures(Suite).keys() == checks
