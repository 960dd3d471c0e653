"""The real `Feed`, `Router` and publication of snapshots on a virtual clock: a run does not depend on load.

Hypothesis chooses how long answers, training and sends take, when servers die, join and leave, and what groups are
dropped. One thread runs all of it: the clock of the event loop goes on only while the trainer waits.
"""

import asyncio
import selectors
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.packing import pack
from hone.envs.episode import Play
from hone.rollout.base import ReplicaLost
from hone.rollout.router import Router
from hone.rollout.settings import RolloutConfig
from hone.schedule.journal import JOURNAL, Journal, read_journal
from hone.schedule.seats import NEWEST
from hone.schedule.window import Window
from hone.tracking.metrics import Timer
from hone.trainers.policy.collection import Collector
from hone.trainers.policy.feed import Feed
from hone.trainers.run.recorder import Recorder
from hone.types import (
    Completion,
    GenerationRequest,
    Metric,
    Prompt,
    SamplingParams,
    Status,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from hone.workers.publishing.publication import ToServers

TOKEN_S, TAIL, PATIENCE_S = 0.01, 20, 600.0


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing else is to be done."""

    def __init__(self):
        self.now = 0.0
        super().__init__(Jumping(self))

    def time(self):
        return self.now


class Jumping(selectors.DefaultSelector):
    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing is left that could happen: a deadlock"
            self._clock.now += max(timeout, 0.0)
            assert self._clock.now < PATIENCE_S, "a wait without end"
        return found


class Loop:
    """The event loop of a run, driven by the trainer's thread while the trainer waits."""

    def __init__(self):
        self.clock = Clock()

    def start(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.clock)

    def run(self, coroutine):
        return self.clock.run_until_complete(coroutine)

    def pass_until(self, futures):
        self.run(asyncio.wait([asyncio.wrap_future(one, loop=self.clock) for one in futures]))

    def close(self):
        for _ in range(100):  # the end of a task may start another
            if not (tasks := asyncio.all_tasks(self.clock)):
                break
            for task in tasks:
                task.cancel()
            self.run(asyncio.wait(tasks))
        assert not asyncio.all_tasks(self.clock)
        self.clock.close()


class Server:
    """Samples the place of each token, one every `TOKEN_S`; holds a version of the weights."""

    positional_seed = True

    def __init__(self, name):
        self.name, self.alive, self.weight_version = name, True, -1
        self.moving = False  # receives weights: it produces nothing
        self._aborts = 0

    async def generate(self, request):
        tokens, versions, aborts = [], [], self._aborts
        while len(tokens) < request.sampling.max_tokens and aborts == self._aborts:
            await asyncio.sleep(TOKEN_S)
            if not self.alive:
                raise ReplicaLost(f"{self.name} died")
            if not self.moving and aborts == self._aborts:
                tokens.append(len(request.tokens) + len(tokens))
                versions.append(self.weight_version)
        reason = StopReason.ABORTED if len(tokens) < request.sampling.max_tokens else StopReason.LENGTH
        return Completion(request.id, tuple(tokens), (-1.0,) * len(tokens), tuple(versions), reason)

    async def abort_all(self):
        self._aborts += 1

    async def start(self):
        await asyncio.sleep(0.3)
        self.alive, self.weight_version, self.moving = True, -1, False

    async def close(self):
        self.alive = False
        self._aborts += 1

    def metrics(self):
        return {"rollout/tokens": Metric.sum(0)}


@dataclass
class Copy:
    version: int


class Rollout:
    """What `Feed` and `Collector` ask of a rollout, over the real router and publication."""

    def __init__(self, loop, load):
        self._loop, self._load = loop, load
        self.router = Router([Server("s-0"), Server("s-1")], RolloutConfig(requests_per_replica=load.seats))
        self.snapshots = ToServers(self.router, self, copies=True)
        self.most_kept = 0
        self._joined = 2

    async def send(self, snapshot, names):
        chosen = [one for one in self.router.replicas if one.name in names]
        with self.router.updating(chosen):
            for one in chosen:
                one.moving = True
            await asyncio.sleep(self._load.send_s)
            self.most_kept = max(self.most_kept, len(self.snapshots._kept.keys() | {snapshot.version}))
            for one in chosen:
                one.moving = False
                if one.alive:
                    one.weight_version = snapshot.version
        for one in chosen:
            if one.alive:
                self.router.replica_serves(one)
        return {}

    def publish(self, actor, version):
        self._loop.start(self.snapshots.publish(Copy(version)))
        return {}

    def make_room(self):
        """It shares no device with the trainer."""

    @contextmanager
    def lending(self):
        yield

    def hold(self, versions):
        return self.snapshots.hold(versions)

    async def generate(self, request):
        self.snapshots.check()
        return await self.router.generate(request)

    async def disturb(self, what):
        """A server dies, joins or leaves, as far as it can."""
        members = [one for one in self.router.pool.members if one.state == "serving"]
        if what == "join":
            joined = Server(f"s-{self._joined}")
            self._joined += 1
            self.router.pool.add(joined)
        elif what == "die" and members:
            members[0].engine.alive = False
        elif what == "leave" and len(members) > 1:
            await self.router.pool.retire(members[0].name, PATIENCE_S)


class Samples:
    """Answers each prompt `samples` times; how long each answer is depends on draw and sample."""

    def __init__(self, load):
        self._load = load

    async def run(self, prompts, play, score):
        found = []
        for prompt in prompts:
            answers = (self._answer(prompt, sample, play) for sample in range(play.samples))
            found.append(await score(TrajectoryGroup(prompt, tuple(await asyncio.gather(*answers)))))
        return found

    async def _answer(self, prompt, sample, play):
        sampling = SamplingParams(max_tokens=self._load.length(prompt.draw, sample))
        said = await play.generate(
            GenerationRequest(f"{play.step}/{prompt.draw}/{sample}/0", prompt.token_ids, sampling)
        )
        start, count = len(prompt.token_ids), len(said.token_ids)
        return Trajectory(
            prompt_id=prompt.prompt_id,
            sample=sample,
            token_ids=(*prompt.token_ids, *said.token_ids),
            prompt_length=start,
            loss_mask=(0,) * start + (1,) * count,
            rollout_logprobs=(0.0,) * start + said.logprobs,
            weight_versions=(-1,) * start + said.weight_versions,
            response="",
            stop_reason=said.stop_reason,
        )


class Rewards:
    def __init__(self, load):
        self._load = load

    async def score(self, group):
        await asyncio.sleep(self._load.reward_s)
        return group

    def complete(self, groups):
        return list(groups)


@dataclass(frozen=True)
class Load:
    """What takes how long, and what happens between steps: nothing of it may change what is trained."""

    train_s: tuple = (0.0,)  # of each step, again and again
    send_s: float = 0.0
    reward_s: float = 0.0
    seats: int = 4
    disturbances: dict = field(default_factory=dict)  # step -> what happens before its groups are taken
    lengths: tuple = (3,)  # of answers, in draw order, again and again
    tails: frozenset = frozenset()  # draws with an answer that is `TAIL` times as long

    def length(self, draw, sample):
        usual = self.lengths[(2 * draw + sample) % len(self.lengths)]
        return usual * TAIL if draw in self.tails and sample == 0 else usual


SAMPLES, PER_STEP, STEPS = 2, 3, 6


def train(load, staleness, one_version, dropped, folder):
    """Train by the clock; returns the journal, the most snapshots that were kept, the seconds, and the metrics."""
    loop = Loop()
    asyncio.set_event_loop(loop.clock)
    try:
        rollout, recorder = Rollout(loop, load), Recorder(Timer())
        window = Window(staleness, PER_STEP, STEPS, one_version)
        collector = Collector(Samples(load), rollout, Rewards(load), loop, recorder)
        feed = Feed(window, collector, rollout, recorder, Journal(folder / JOURNAL), PATIENCE_S)
        play = Play(rollout.generate, SamplingParams(max_tokens=1), 0, SAMPLES)
        loop.run(rollout.snapshots.publish(Copy(0)))
        drawn, figures = 0, []
        for step in range(1, STEPS + 1):
            kept, played = [], []
            for _ in range(2):  # groups that are dropped are replaced once
                missing = PER_STEP - len(kept)
                numbers = range(drawn, drawn + feed.room(missing, step))
                drawn = numbers.stop
                prompts = [Prompt(f"rows/{n}", (1, 2), (), "", "rows", draw=n) for n in numbers]
                feed.admit(prompts, play.at(step), missing, {})
                assert len(feed.ahead) <= missing + staleness * PER_STEP
                if step in load.disturbances:
                    loop.start(rollout.disturb(load.disturbances[step]))
                loop.pass_until([feed._draws[number].group for number in sorted(feed.ahead)[:missing]])
                found = [without(one) if one.prompt.draw in dropped else one for one in feed.take(missing)]
                played += found
                kept += [one for one in found if one.trainable]
                if len(kept) == PER_STEP:
                    break
            batch = pack(played) if kept else None
            feed.commit(step, played, batch)
            figures.append(recorder.drain())
            loop.run(asyncio.sleep(load.train_s[step % len(load.train_s)]))
            if batch is not None:
                feed.publish(None, step)
        assert not feed.ahead
        return list(read_journal(folder / JOURNAL)), rollout.most_kept, loop.clock.now, figures
    finally:
        loop.close()
        asyncio.set_event_loop(None)


def without(group):
    """The group, filtered out."""
    members = tuple(one.with_(status=Status.FILTERED, error="planted") for one in group.trajectories)
    return TrajectoryGroup(group.prompt, members)


seconds = st.floats(0.0, 1.0).map(lambda value: round(value, 2))
loads = st.builds(
    Load,
    train_s=st.lists(seconds, min_size=1, max_size=4).map(tuple),
    send_s=seconds,
    reward_s=seconds,
    seats=st.integers(1, 4),
    disturbances=st.dictionaries(st.integers(1, STEPS), st.sampled_from(["die", "join", "leave"]), max_size=3),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    tails=st.frozensets(st.integers(0, STEPS * PER_STEP), max_size=2),
)


@settings(max_examples=30)
@given(loads, st.integers(1, 3), st.booleans(), st.frozensets(st.integers(0, 20), max_size=4))
def test_whatever_takes_how_long_draws_are_taken_in_order_and_no_token_is_too_old(load, staleness, one, dropped):
    with tempfile.TemporaryDirectory() as folder:
        records, most_kept, _, _ = train(load, staleness, one, dropped, Path(folder))
    admitted = [number for record in records for number in record["admitted"]]
    taken = [number for record in records for number in record["taken"]]
    assert admitted == taken == list(range(len(taken)))
    assert {int(number) for record in records for number in record["dropped"]} == dropped & set(taken)
    assert most_kept <= (staleness if one else 0) + 2, "snapshots: those that draws need, the newest, one being sent"
    versions = [0]
    for record in records:
        assert record["version"] == versions[-1]
        for number, answers in record["spans"].items():
            lengths = [sum(tokens for _, tokens in answer) for answer in answers]
            assert lengths == [load.length(int(number), sample) for sample in range(SAMPLES)]
            sampled = [version for answer in answers for version, _ in answer]
            assert not one or len(set(sampled)) == 1, "finish: one version for all answers to a prompt"
            assert set(sampled) <= set(versions[-staleness - 1 :])
        if "batch" in record:
            versions.append(record["step"])


@settings(max_examples=12)
@given(loads, loads, st.integers(1, 2), st.frozensets(st.integers(0, 20), max_size=3))
def test_with_finish_the_record_depends_on_the_answers_alone(load, other, staleness, dropped):
    """The same answers under two loads: the same journal, with its versions and the digests of its batches."""
    same = Load(**{**vars(other), "lengths": load.lengths, "tails": load.tails})
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as another:
        first, *_ = train(load, staleness, True, dropped, Path(folder))
        second, *_ = train(same, staleness, True, dropped, Path(another))
    assert first == second


def test_the_clock_counts_what_overlaps():
    """Every answer takes 0.1 s, and training too: ahead, a step takes the longer of both instead of their sum."""
    load = Load(train_s=(0.1,), lengths=(10,))
    with tempfile.TemporaryDirectory() as folder:
        _, _, took, _ = train(load, 1, True, frozenset(), Path(folder))
    assert took < 0.1 * STEPS * 1.5


def test_mixed_answers_have_mixed_versions():
    load = Load(train_s=(0.05,), lengths=(9,), tails=frozenset({4}))
    with tempfile.TemporaryDirectory() as folder:
        records, _, _, figures = train(load, 2, False, frozenset(), Path(folder))
    spans = [answer for record in records for answers in record["spans"].values() for answer in answers]
    assert Counter(len(one) > 1 for one in spans)[True] > 3
    counted = sum(line["schedule/spans_per_answer"] for line in figures) / len(figures)
    assert counted == pytest.approx(sum(map(len, spans)) / len(spans))
    assert NEWEST not in {version for one in spans for version, _ in one}
