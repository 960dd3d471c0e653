"""Every order of events of one model's commands, over the real `Lane`.

A client sends commands 0 .. n-1, in any order, some twice, some never, one with another content; the process may be
killed and start again from its registry. `explore` visits every reachable state breadth first. A broken rule raises
Broken with the events that led to it; a state from which not everything that was taken can get a result is a deadlock.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from hone.schedule.lanes import Lane, Verdict

MINE, OTHER = "mine", "other"


class Broken(AssertionError):
    """A rule was broken, or something that was taken can get no result."""


@dataclass(frozen=True)
class Limits:
    commands: int
    repeats: int = 0
    conflicts: int = 0
    gaps: int = 0  # waits that are given up
    closes: int = 0
    crashes: int = 0


class World(NamedTuple):
    lane: Lane
    taken: frozenset[int] = frozenset()  # in the registry
    results: tuple[tuple[int, str], ...] = ()  # number and "ran", "failed"
    ran: tuple[int, ...] = ()  # in the order in which they had a result
    refused: frozenset[int] = frozenset()  # that came too late
    closed: bool = False
    repeats: int = 0
    conflicts: int = 0
    gaps: int = 0
    closes: int = 0
    crashes: int = 0


def arrivals(world, limits):
    for number in range(limits.commands):
        new = number not in world.taken and number not in world.refused
        if new:
            yield f"arrive {number}", arrived(world, number)
        elif world.repeats < limits.repeats:
            yield f"repeat {number}", repeated(world, number)._replace(repeats=world.repeats + 1)
        if number in world.taken and world.conflicts < limits.conflicts:
            yield f"conflict {number}", conflicting(world, number)._replace(conflicts=world.conflicts + 1)


def arrived(world, number):
    lane, verdict = world.lane.offer(number, MINE)
    given_up = any(number < other for other, how in world.results if how == "failed")
    if world.closed:
        expect(verdict is Verdict.CLOSED, f"command {number} came after the end and is {verdict}")
    elif verdict is Verdict.LATE:
        expect(given_up, f"command {number} is late, and nothing was given up")
    else:
        expect(verdict is Verdict.QUEUED, f"command {number} is new and is {verdict}")
        return world._replace(lane=lane, taken=world.taken | {number})
    expect(lane == world.lane, "a refused command changed the order")
    return world._replace(refused=world.refused | {number})


def repeated(world, number):
    lane, verdict = world.lane.offer(number, MINE)
    expect(lane == world.lane, f"the repeated command {number} changed the order")
    wanted = Verdict.REPEATED if number in world.taken else Verdict.LATE
    if number in world.refused and world.closed:
        wanted = verdict if verdict in (Verdict.LATE, Verdict.CLOSED) else wanted
    expect(verdict is wanted, f"the repeated command {number} is {verdict}, not {wanted}")
    return world


def conflicting(world, number):
    lane, verdict = world.lane.offer(number, OTHER)
    expect(verdict is Verdict.CONFLICT and lane == world.lane, f"another command {number} is {verdict}")
    return world


def started(world):
    number = world.lane.ready
    settled = {one for one, _ in world.results}
    before = [one for one in range(number) if one not in settled and one not in world.refused]
    missing = [one for one in before if one in world.taken or not any(one < other for other, _ in failed(world))]
    expect(not missing, f"command {number} began before {missing}")
    expect(number not in settled, f"command {number} began twice")
    expect(not world.closed, f"command {number} began after the end")
    return world._replace(lane=world.lane.start())


def failed(world):
    return [one for one in world.results if one[1] == "failed"]


def ended(world):
    number = world.lane.running[0]
    results = (*world.results, (number, "ran"))
    return world._replace(lane=world.lane.end(), results=results, ran=(*world.ran, number))


def with_failed(world, lane, numbers):
    settled = {one for one, _ in world.results}
    expect(not settled & set(numbers), f"{numbers} have a result already")
    return world._replace(lane=lane, results=(*world.results, *((one, "failed") for one in numbers)))


def crashed(world, make):
    """Restore a world from the registry's rows, as `Training.restore` does."""
    settled = sorted(one for one, _ in world.results)
    waiting = tuple((one, MINE) for one in sorted(world.taken - set(settled)))
    lane = make(next=settled[-1] + 1 if settled else 0, waiting=waiting, ended=tuple((one, MINE) for one in settled))
    return world._replace(lane=lane, crashes=world.crashes + 1)


def expect(holds, text):
    if not holds:
        raise Broken(text)


def successors(world, limits, make):
    yield from arrivals(world, limits)
    if world.lane.ready is not None:
        yield "start", started(world)
    if world.lane.running is not None:
        yield "end", ended(world)
    if world.lane.has_gap and world.gaps < limits.gaps:
        lane, numbers = world.lane.give_up()
        expect(numbers, "a gap was given up and nothing failed")
        yield "give up", with_failed(world, lane, numbers)._replace(gaps=world.gaps + 1)
    if not world.closed and world.closes < limits.closes:
        lane, numbers = world.lane.close()
        yield "close", with_failed(world, lane, numbers)._replace(closed=True, closes=world.closes + 1)
    if not world.closed and world.crashes < limits.crashes:
        yield "crash", crashed(world, make)


def explore(limits, make=Lane):
    """Visit every state; returns their number."""
    start = World(make())
    came: dict[World, tuple[World, str] | None] = {start: None}
    back: dict[World, list[World]] = {}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        try:
            for event, after in successors(world, limits, make):
                if not is_fault(event, world):
                    back.setdefault(after, []).append(world)
                if after not in came:
                    came[after] = (world, event)
                    queue.append(after)
        except Broken as error:
            raise Broken(f"{error}, after {path_to(world, came)}") from None
    check_ends(came, back, limits)
    return len(came)


def is_fault(event, world):
    """Return True for events without which an end must be reachable: a kill, and giving up when nothing is missing."""
    first = world.lane.waiting[0][0] if world.lane.waiting else 0
    return event in ("close", "crash") or (event == "give up" and set(range(first)) <= world.taken | world.refused)


def settled(world, limits):
    """Every command was taken or refused, and everything that was taken has one result."""
    numbers = [one for one, _ in world.results]
    return world.taken | world.refused == set(range(limits.commands)) and sorted(numbers) == sorted(world.taken)


def check_ends(came, back, limits):
    good = deque(world for world in came if settled(world, limits))
    reached = set(good)
    while good:
        for before in back.get(good.popleft(), ()):
            if before not in reached:
                reached.add(before)
                good.append(before)
    for world in came:
        if world not in reached:
            raise Broken(f"no end can be reached, after {path_to(world, came)}")
        order = list(world.ran)
        if order != sorted(order):
            raise Broken(f"commands had results in the order {order}, after {path_to(world, came)}")


def path_to(world, came):
    events = []
    while came[world] is not None:
        world, event = came[world]
        events.append(event)
    return ", ".join(reversed(events)) or "nothing"
