"""Every order of events of a small asynchronous run, over the real `Window`, `PromptLedger` and seat rules.

The model adds what the run has around them: a trainer, two replicas, snapshots, checkpoints, and their failures.
`explore` visits every reachable state breadth first. A broken rule raises Broken with the events that led to it. Then
it follows all edges but faults backwards from the end of the run: a state from which the end cannot be reached is a
deadlock.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hone.config import ConfigError
from hone.schedule import seats
from hone.schedule.window import LedgerError, PromptLedger, ScheduleError, Window

WAITING, ENDED, ELSEWHERE = -1, -2, -3  # of an answer, between two turns at the last; else the replica that samples it
FAULTS = ("die", "crash", "join", "leave")  # events that a run must not need to go on
TORN = -7  # content of a replica that was sent weights while they were trained


class Broken(AssertionError):
    """A rule was broken, or a state was found from which the run cannot end."""


class Replica(NamedTuple):
    proven: int = -1
    content: int = -1  # version of the tensors that it holds
    target: int = -1  # of the weights that it is being sent; -1: none
    alive: bool = True
    gone: bool = False  # it has left


class Saved(NamedTuple):
    window: Window
    ledger: tuple
    step: int
    drawn: int
    sampled: tuple[tuple[int, int], ...] = ()  # (draw, version) of answers that were there


class World(NamedTuple):
    window: Window
    ledger: tuple = (0, (), 0, 0)
    drawn: int = 0
    step: int = 1
    short: int = 1  # groups that this step still takes; 0: it trains
    kept: int = 0  # groups that this step trains on
    answers: tuple[tuple[int, int, int], ...] = ()  # (draw, where, version of its first token)
    replicas: tuple[Replica, ...] = (Replica(0, 0), Replica(0, 0))
    snapshots: frozenset[int] = frozenset({0})
    settled: Saved | None = None  # after the last whole step
    saved: Saved | None = None  # on the disk
    last: int = -1  # draw that was taken last
    deaths: int = 0
    crashes: int = 0
    drops: int = 0
    joins: int = 0
    leaves: int = 0
    turns: int = 0


@dataclass(frozen=True)
class Rules:
    """What a mutant changes."""

    fits: Callable = seats.fits
    moves: Callable = seats.moves
    needed: Callable = seats.needed
    takes: Callable[[World], list[int]] = lambda world: [one.number for one in world.window.open[: world.short]]
    skipped_version: Callable[[Window, int], Window] = lambda window, step: window  # `passed`: the version stays
    restored_content: Callable[[World, int], int] = lambda world, version: version
    reopened: Callable[[Window, set[int]], Window] = Window.reopened
    resent: Callable[[World, int], World] = lambda world, index: resent(world, index)


@dataclass(frozen=True)
class Limits:
    """How much happens in one run."""

    draws: int = 6
    deaths: int = 1
    crashes: int = 1
    drops: int = 1
    joins: int = 0
    leaves: int = 0
    turns: int = 0  # in which an answer is neither at a replica nor waiting: a tool works


Edges = Iterator[tuple[str, World]]


def events(world: World, rules: Rules, limits: Limits) -> Edges:
    """Every event that may happen next, with the world after it."""
    if world.step <= world.window.steps:
        yield from trainer(world, rules, limits)
    yield from rollout(world, rules, limits)
    yield from membership(world, rules, limits)
    yield from faults(world, rules, limits)


# ------------------------------------------------------------------------------------------------------------ trainer


def trainer(world: World, rules: Rules, limits: Limits) -> Edges:
    window, short = world.window, world.short
    if short and (room := window.room(short, world.step)):
        room = min(room, limits.draws - world.drawn)
        numbers = range(world.drawn, world.drawn + room)
        if room:
            answers = (*world.answers, *((number, WAITING, -1) for number in numbers))
            ledger = changed(world.ledger, lambda one: one.drawn(numbers))
            opened = window.admitted(numbers, world.step, short)
            yield "admit", world._replace(window=opened, drawn=world.drawn + room, answers=answers, ledger=ledger)
            return
    if short:
        takes = rules.takes(world)
        where = {number: (place, version) for number, place, version in world.answers}
        if len(takes) == short and all(where[number][0] == ENDED for number in takes):
            yield from take(world, takes, limits)
        return
    yield from update(world, rules)


def take(world: World, takes: list[int], limits: Limits) -> Edges:
    if takes[0] < world.last:
        raise Broken(f"draw {takes[0]} is taken after draw {world.last}")
    left = tuple(one for one in world.answers if one[0] not in takes)
    window = replace(world.window, open=tuple(one for one in world.window.open if one.number not in takes))
    of = {one.number: one for one in world.window.open}
    for number, _, version in world.answers:
        if number in takes:
            world.window.ages([version])  # raises beyond the bound
            if not seats.fits(version, of[number].versions):
                raise Broken(f"draw {number} of {of[number].versions} was sampled from version {version}")
    base = world._replace(window=window, answers=left, last=takes[-1])
    finished = changed(world.ledger, lambda one: one.finished(takes))
    yield "take", base._replace(ledger=finished, short=0, kept=world.kept + len(takes))
    if world.drops < limits.drops:  # the first group is filtered out, and replaced from those ahead, or not
        dropped = changed(finished, lambda one: one.dropped(takes[:1], "filtered"))
        fewer = base._replace(ledger=dropped, kept=world.kept + len(takes) - 1, drops=world.drops + 1)
        yield "drop, replace", fewer._replace(short=1)
        yield "drop", fewer._replace(short=0)


def update(world: World, rules: Rules) -> Edges:
    step, snapshots = world.step, world.snapshots
    if world.kept:
        name, window = "train", world.window.trained(step)
        snapshots = tidy(rules, world, snapshots | {step})
    else:
        name, window = "pass", rules.skipped_version(world.window, step)
    ahead = [one.number for one in window.open]
    ledger = changed(world.ledger, lambda one: one.trained_all_finished(ahead))
    settled = Saved(window, ledger, step, world.drawn)
    after = world._replace(window=window, ledger=ledger, snapshots=snapshots, settled=settled)
    yield name, after._replace(step=step + 1, short=window.per_step, kept=0)


# ------------------------------------------------------------------------------------------------------------ rollout


def rollout(world: World, rules: Rules, limits: Limits) -> Edges:
    ranges = {one.number: one.versions for one in world.window.open}
    for number, place, oldest in world.answers:
        if place == WAITING:
            for index, replica in enumerate(world.replicas):
                if replica.alive and replica.target == -1 and rules.fits(replica.proven, ranges[number]):
                    yield f"seat {number}", seated(world, number, index, oldest)
        elif place >= 0 and world.replicas[place].target == -1 and world.replicas[place].alive:  # else they stand still
            yield f"end {number}", ended(world, number, oldest, rules)
            if world.turns < limits.turns:
                yield f"turn {number}", placed(world, number, ELSEWHERE, oldest)._replace(turns=world.turns + 1)
        elif place == ELSEWHERE:
            yield f"next turn {number}", placed(world, number, WAITING, oldest)
    if all(replica.target == -1 for replica in world.replicas):
        found = chosen_moves(world, rules, ranges)
        if found:
            target = min(found.values())
            moved = [
                one._replace(target=target) if found.get(str(index)) == target else one
                for index, one in enumerate(world.replicas)
            ]
            yield f"send {target}", world._replace(replicas=tuple(moved))
    for index, replica in enumerate(world.replicas):
        if replica.target != -1 and replica.alive:
            content = rules.restored_content(world, replica.target) if replica.proven == -1 else replica.target
            yield f"prove {index}", with_replica(world, index, Replica(replica.target, content))


def chosen_moves(world: World, rules: Rules, ranges: dict) -> dict[str, int]:
    standing = []
    for index, replica in enumerate(world.replicas):
        if replica.alive:
            running = frozenset(ranges[number] for number, place, _ in world.answers if place == index)
            standing.append(seats.Standing(str(index), replica.proven, running))
    waiting = [ranges[number] for number, place, _ in world.answers if place == WAITING]
    return rules.moves(standing, waiting, held(world), world.snapshots)


def held(world: World) -> list[tuple[int, int]]:
    ranges = {one.number: one.versions for one in world.window.open}
    return [ranges[number] for number, place, _ in world.answers if place != ENDED]


def seated(world: World, number: int, index: int, oldest: int) -> World:
    """An answer begins at a replica, or goes on there after its replica died."""
    replica = world.replicas[index]
    if replica.content != replica.proven:
        raise Broken(f"replica {index} says version {replica.proven}, it has {replica.content}")
    if world.window.one_version and oldest not in (-1, replica.content):
        raise Broken(f"draw {number} goes on from version {oldest} to {replica.content}")
    return placed(world, number, index, replica.content if oldest == -1 else oldest)


def ended(world: World, number: int, oldest: int, rules: Rules) -> World:
    after = placed(world, number, ENDED, oldest)
    return after._replace(snapshots=tidy(rules, after, after.snapshots))


def tidy(rules: Rules, world: World, snapshots: frozenset[int]) -> frozenset[int]:
    needed = frozenset(rules.needed(held(world), snapshots))
    most = world.window.staleness + 1 if world.window.one_version else 1
    if len(needed) > most:
        raise Broken(f"{len(needed)} snapshots are kept, and {most} is the most")
    return needed | ({one.target for one in world.replicas} & snapshots)  # is being sent


def membership(world: World, rules: Rules, limits: Limits) -> Edges:
    """A server joins without weights, or leaves, and its answers are sent to others."""
    if world.joins < limits.joins:
        yield "join", world._replace(replicas=(*world.replicas, Replica()), joins=world.joins + 1)
    if world.leaves < limits.leaves:
        for index, replica in enumerate(world.replicas):
            others = [one for place, one in enumerate(world.replicas) if place != index and one.alive]
            if replica.alive and replica.target == -1 and others:  # it waits for a send, and the last one stays
                left = with_replica(rules.resent(world, index), index, Replica(alive=False, gone=True))
                yield f"leave {index}", left._replace(leaves=world.leaves + 1)


def resent(world: World, index: int) -> World:
    """The answers of a replica wait for another one."""
    answers = tuple((n, WAITING, v) if place == index else (n, place, v) for n, place, v in world.answers)
    return world._replace(answers=answers)


# ------------------------------------------------------------------------------------------------------------- faults


def faults(world: World, rules: Rules, limits: Limits) -> Edges:
    for index, replica in enumerate(world.replicas):
        if replica.alive and world.deaths < limits.deaths:
            died = with_replica(resent(world, index), index, Replica(alive=False))
            yield f"die {index}", died._replace(deaths=world.deaths + 1)
        elif not replica.alive and not replica.gone:
            yield f"revive {index}", with_replica(world, index, Replica())
    sampled = {number: version for number, place, version in world.answers if place == ENDED}
    if world.settled is not None and world.crashes < limits.crashes:
        open_draws = [one.number for one in world.settled.window.open]
        if world.settled.step == world.step - 1 and not world.kept:  # they were not taken since
            groups = tuple((number, sampled[number]) for number in open_draws if number in sampled)
            yield "save", world._replace(saved=world.settled._replace(sampled=groups), settled=None)
    if world.saved is not None and world.crashes < limits.crashes:
        yield "crash", resumed(world, world.saved, rules)


def resumed(world: World, saved: Saved, rules: Rules) -> World:
    window = world.window.restored(saved.window.state_dict())
    version, there = window.version, dict(saved.sampled)
    window = rules.reopened(window, {one.number for one in window.open} - there.keys())
    return World(
        window=window,
        ledger=saved.ledger,
        drawn=saved.drawn,
        step=saved.step + 1,
        short=window.per_step,
        answers=tuple(
            (one.number, ENDED, there[one.number]) if one.number in there else (one.number, WAITING, -1)
            for one in window.open
        ),
        replicas=(Replica(version, version),) * len(world.replicas),
        snapshots=frozenset({version}),
        last=min((one.number for one in window.open), default=saved.drawn) - 1,
        deaths=world.deaths,
        crashes=world.crashes + 1,
        drops=world.drops,
        joins=world.joins,
        leaves=world.leaves,
        turns=world.turns,
    )


# -------------------------------------------------------------------------------------------------------------- tools


def placed(world: World, number: int, place: int, version: int) -> World:
    return world._replace(answers=tuple((number, place, version) if one[0] == number else one for one in world.answers))


def with_replica(world: World, index: int, replica: Replica) -> World:
    return world._replace(replicas=(*world.replicas[:index], replica, *world.replicas[index + 1 :]))


def changed(ledger: tuple, change: Callable[[PromptLedger], None]) -> tuple:
    """The ledger after a change, as a value."""
    number, opened, trained, dropped = ledger
    one = PromptLedger()
    one.load_state_dict(
        {"next": number, "open": dict(opened), "trained": trained, "dropped": {"filtered": dropped} if dropped else {}}
    )
    change(one)
    state = one.state_dict()
    opened = tuple((int(draw), found) for draw, found in state["open"].items())
    return state["next"], opened, state["trained"], sum(state["dropped"].values())


def explore(start: World, rules: Rules, limits: Limits) -> int:
    """Visit every reachable state; returns how many there are. Raises Broken."""
    gc.freeze()
    gc.disable()  # no state refers to another: collections would look at millions of them in vain
    try:
        return _explore(start, rules, limits)
    finally:
        gc.enable()
        gc.unfreeze()


def _explore(start: World, rules: Rules, limits: Limits) -> int:
    worlds, ids = [start], {start: 0}  # a state is hashed once for every edge, and known by its number then
    came_from: list[tuple[int, str] | None] = [None]
    before: list[list[int]] = [[]]
    ends = []
    for here, world in enumerate(worlds):  # grows while it is read
        try:
            if world.step > world.window.steps:
                check_end(world)
                ends.append(here)
                continue
            for name, after in events(world, rules, limits):
                there = ids.setdefault(after, len(worlds))
                if there == len(worlds):
                    worlds.append(after)
                    came_from.append((here, name))
                    before.append([])
                if not name.startswith(FAULTS):
                    before[there].append(here)
        except (Broken, ConfigError, ScheduleError, LedgerError, KeyError) as error:
            raise Broken(f"{type(error).__name__}: {error}, after {story(here, came_from)}") from error
    alive, queue = set(ends), deque(ends)
    while queue:
        for one in before[queue.popleft()]:
            if one not in alive:
                alive.add(one)
                queue.append(one)
    stuck = next((one for one in range(len(worlds)) if one not in alive), None)
    if stuck is not None:
        raise Broken(f"the run cannot end, after {story(stuck, came_from)}")
    return len(worlds)


def check_end(world: World) -> None:
    drawn, opened, trained, dropped = world.ledger
    if opened or trained + dropped != drawn:
        raise Broken(f"at the end {opened} of {drawn} draws are open")


def story(number: int, came_from: list[tuple[int, str] | None]) -> str:
    names = []
    while (found := came_from[number]) is not None:
        number, name = found
        names.append(name)
    return ", ".join(reversed(names))
