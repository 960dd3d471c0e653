"""No order of arrivals, repeats, gaps, ends and kills breaks the order of a model's commands; mutants are found."""

from dataclasses import replace
from random import Random

import pytest

from hone.schedule.lanes import Lane, NestedTurns, Shifts, Turns, Verdict
from tests.schedule.lanes import Broken, Limits, explore

ALL = Limits(commands=3, repeats=1, conflicts=1, gaps=1, closes=1, crashes=1)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(commands=4, repeats=1, crashes=1),
        Limits(commands=4, gaps=1, closes=1),
        ALL,
        pytest.param(Limits(commands=5, repeats=2, conflicts=1, gaps=2, closes=1, crashes=2), marks=pytest.mark.slow),
    ],
)
def test_every_order_of_events_ends_with_one_result_for_each_command(limits, capsys):
    states = explore(limits)
    with capsys.disabled():
        print(f"\n{limits}: {states:,} states")


class RunsPastGaps(Lane):
    @property
    def ready(self):
        return self.waiting[0][0] if self.running is None and self.waiting else None

    def start(self):
        return replace(self, next=self.waiting[0][0] + 1, running=self.waiting[0], waiting=self.waiting[1:])


class RunsTwoAtOnce(Lane):
    @property
    def ready(self):
        return self.next if self.waiting and self.waiting[0][0] == self.next else None


class ForgetsResults(Lane):
    def end(self):
        return replace(self, running=None)


class TakesRepeatsAsNew(Lane):
    def offer(self, number, digest):
        if self.running is not None and number == self.running[0]:
            return replace(self, waiting=((number, digest), *self.waiting)), Verdict.QUEUED
        return super().offer(number, digest)


class OverwritesOtherContent(Lane):
    def offer(self, number, digest):
        lane, verdict = super().offer(number, digest)
        return (lane, Verdict.REPEATED) if verdict is Verdict.CONFLICT else (lane, verdict)


class WaitsForEver(Lane):
    def give_up(self):
        failed = tuple(number for number, _ in self.waiting)
        return replace(self, waiting=(), ended=(*self.ended, *self.waiting)), failed


class TakesCommandsAfterTheEnd(Lane):
    def close(self):
        lane, failed = super().close()
        return replace(lane, closed=False), failed


class LosesWhatWaits(Lane):
    def close(self):
        return replace(self, closed=True, waiting=()), ()


class LosesTheRunningOne(Lane):
    def give_up(self):
        lane, failed = super().give_up()
        return replace(lane, ended=self.ended), failed


MUTANTS = [
    RunsPastGaps,
    RunsTwoAtOnce,
    ForgetsResults,
    TakesRepeatsAsNew,
    OverwritesOtherContent,
    WaitsForEver,
    TakesCommandsAfterTheEnd,
    LosesWhatWaits,
    LosesTheRunningOne,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_exploration_finds_what_breaks_the_order(mutant):
    with pytest.raises((Broken, AssertionError)):
        explore(ALL, mutant)


def test_a_command_too_far_ahead_is_told_to_come_again():
    lane = Lane(room=2)
    assert lane.offer(1, "x")[1] is Verdict.QUEUED
    assert lane.offer(2, "x")[1] is Verdict.FULL


def test_turns_serve_who_waited_longest_and_forget_nobody():
    turns, served = Turns(), []
    for _ in range(6):
        turns, chosen = turns.pick({"a", "b", "c"})
        served.append(chosen)
    assert served == ["a", "b", "c", "a", "b", "c"]
    turns, chosen = turns.pick({"c"})  # alone, it is served again at once
    assert chosen == "c"
    served = []
    for _ in range(4):
        turns, chosen = turns.pick({"c", "new"})
        served.append(chosen)
    assert served == ["c", "new", "c", "new"]
    assert turns.pick(())[1] is None


def test_parties_take_turns_and_so_do_the_members_of_each():
    turns, ready, found = NestedTurns(), {"a": ["a1", "a2"], "b": ["b1"]}, []
    for _ in range(6):
        turns, chosen = turns.pick(ready)
        found.append(chosen)
    assert found == ["a1", "b1", "a2", "b1", "a1", "b1"]
    assert turns.pick({})[1] is None
    turns = turns.without("a", "a2")
    assert turns.pick({"a": ["a1"]})[1] == "a1"
    assert "a2" not in turns.members["a"].order


@pytest.mark.parametrize("places", [1, 2, 3])
def test_queues_share_few_places_and_none_waits_for_ever(places):
    """Work begins in shifts and ends in any order; the longest wait is bounded by what the others may do."""
    most, random = 3, Random(places)
    queues = dict.fromkeys("vwxyz", 8)
    shifts, running, began = Shifts(places, most), [], []
    while any(queues.values()) or running:
        waiting = [name for name, left in queues.items() if left]
        shifts, chosen = shifts.pick(waiting, set(running))
        if chosen is not None:
            assert queues[chosen] > 0
            shifts = shifts.count(chosen, 1)
            queues[chosen] -= 1
            running.append(chosen)
            began.append(chosen)
            assert len(set(running)) <= places
        if running and (chosen is None or random.random() < 0.5):
            running.remove(random.choice(running))
    assert len(began) == 40
    first = [began.index(name) for name in "vwxyz"]
    assert max(first) <= 4 * most  # everybody began before anybody had a second shift


def test_a_queue_goes_on_beyond_its_share_while_nobody_else_waits():
    shifts = Shifts(1, 2)
    for _ in range(5):
        shifts, chosen = shifts.pick(["a"], {"a"})
        assert chosen == "a"
        shifts = shifts.count("a", 1)
    assert shifts.pick(["a", "b"], {"a"})[1] is None  # its place is free when nothing of it runs
    shifts, chosen = shifts.pick(["a", "b"], set())
    assert chosen == "b"
    assert shifts.without("a").done == {"b": 0}
