"""Every order in which work for three queues arrives, begins, ends and is retired: nobody starves."""

from dataclasses import replace

import pytest

from hone.schedule.lanes import Shifts, Turns

QUEUES = "abc"
MOST = 1  # pieces of a shift


def explore(kind, places, pieces):
    """Visit every state; returns their number. Raises AssertionError where a rule is broken.

    A state: the shifts, pieces that wait and run of each queue, pieces that may still arrive, and how many pieces of
    others have begun since a queue, of which nothing runs, began to wait.
    """
    start = kind(places, MOST), (0,) * 3, (0,) * 3, (pieces,) * 3, (0,) * 3
    seen, states = {key(start)}, [start]
    for state in states:
        for following in steps(*state):
            if key(following) not in seen:
                seen.add(key(following))
                states.append(following)
    return len(states)


def key(state):
    shifts, *rest = state
    return tuple(sorted(shifts.done.items())), shifts.turns.order, *rest


def changed(values, at, by):
    return tuple(value + by if number == at else value for number, value in enumerate(values))


def steps(shifts, waiting, running, left, passed):
    for number, name in enumerate(QUEUES):
        if left[number]:
            yield shifts, changed(waiting, number, 1), running, changed(left, number, -1), passed
        if running[number]:
            yield shifts, waiting, changed(running, number, -1), left, passed
        if not waiting[number] and not running[number]:
            yield shifts.without(name), waiting, running, left, passed
    wanted = [name for number, name in enumerate(QUEUES) if waiting[number]]
    active = {name for number, name in enumerate(QUEUES) if running[number]}
    after, chosen = shifts.pick(wanted, active)
    if chosen is None:
        assert not wanted or active, "work waits, nothing runs, and nothing may begin"
        return
    assert chosen in wanted, "a queue without work was chosen"
    at = QUEUES.index(chosen)
    running, waiting = changed(running, at, 1), changed(waiting, at, -1)
    assert sum(map(bool, running)) <= shifts.places, "more queues are served than there are places"
    passed = tuple(
        0 if number == at or not waiting[number] or running[number] else passed[number] + 1 for number in range(3)
    )
    assert max(passed) <= 2 * MOST + 1, "a queue waits while others have more than a shift each"
    yield after.count(chosen, 1), waiting, running, left, passed


@pytest.mark.parametrize(("places", "pieces"), [(1, 3), (2, 2)])
def test_every_order_of_events_keeps_the_places_and_serves_everybody(places, pieces, capsys):
    states = explore(Shifts, places, pieces)
    with capsys.disabled():
        print(f"\n{places} places: {states:,} states")


class GoesOnForEver(Shifts):
    def count(self, queue, pieces):
        return self


class TakesAPlaceTooMany(Shifts):
    def pick(self, waiting, running):
        shifts, chosen = replace(self, places=self.places + 1).pick_of_base(waiting, running)
        return replace(shifts, places=self.places), chosen

    def pick_of_base(self, waiting, running):
        return super().pick(waiting, running)


class ForgetsWhoRuns(Shifts):
    def pick(self, waiting, running):
        return super().pick(waiting, ())


class ServesTheFirst(Shifts):
    def pick(self, waiting, running):
        shifts, chosen = super().pick(waiting, running)
        return replace(shifts, turns=self.turns), chosen


class NewcomersFirst(Turns):
    def pick(self, ready):
        return Turns((*sorted(set(ready) - set(self.order)), *self.order)).pick(ready)

    def without(self, party):
        return NewcomersFirst(super().without(party).order)


class ServesNewcomersFirst(Shifts):
    def pick(self, waiting, running):
        return replace(self, turns=NewcomersFirst(self.turns.order)).picked(waiting, running)

    def picked(self, waiting, running):
        return super().pick(waiting, running)


class WaitsForItself(Shifts):
    def pick(self, waiting, running):
        return (self, None) if len(waiting) == len(QUEUES) else super().pick(waiting, running)


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        (GoesOnForEver, "more than a shift"),
        (TakesAPlaceTooMany, "more queues are served"),
        (ForgetsWhoRuns, "more queues are served"),
        (ServesTheFirst, "more than a shift"),
        (WaitsForItself, "nothing may begin"),
        (ServesNewcomersFirst, "more than a shift"),
    ],
)
def test_the_exploration_finds_what_breaks_a_rule(mutant, found):
    with pytest.raises(AssertionError, match=found):
        explore(mutant, 1, 3)
