"""Order of the commands of one model, and turns between tenants: no clocks, no tensors, no bytes.

    offer(seq) --gap before it--> waiting --the gap is filled--> ready --start--> running --end--> ended (remembered)
                                     '--give_up (the gap was never filled), close--> ended as failed

A model's commands run one at a time in the order of their numbers, whatever the order in which they arrive. A number
that comes again is the same command if its content is the same, and is refused otherwise. All values are immutable: a
test visits every order of events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Verdict(StrEnum):
    """The answer to a command that arrives."""

    QUEUED = "queued"  # new: it runs in its turn
    REPEATED = "repeated"  # it came before, with the same content
    CONFLICT = "conflict"  # another command has the number
    LATE = "late"  # the number was given up, or is forgotten
    FULL = "full"  # too far ahead of what runs: come again later
    CLOSED = "closed"  # the model takes no more commands


Numbered = tuple[int, str]  # a command's number and the digest of its content


@dataclass(frozen=True, slots=True)
class Lane:
    """The commands of one model. Command 0 makes the model."""

    next: int = 0  # the number that runs next
    waiting: tuple[Numbered, ...] = ()  # in the order of their numbers, none below `next`
    running: Numbered | None = None
    ended: tuple[Numbered, ...] = ()  # whose results are remembered
    closed: bool = False
    room: int = 4096  # numbers that may wait beyond `next`

    def offer(self, number: int, digest: str) -> tuple[Lane, Verdict]:
        """Take a command that arrives."""
        known = dict((*self.waiting, *self.ended, *filter(None, [self.running])))
        if number in known:
            return self, Verdict.REPEATED if known[number] == digest else Verdict.CONFLICT
        if self.closed:
            return self, Verdict.CLOSED
        if number < self.next or (self.running is not None and number == self.running[0]):
            return self, Verdict.LATE
        if number >= self.next + self.room:
            return self, Verdict.FULL
        return replace(self, waiting=tuple(sorted((*self.waiting, (number, digest))))), Verdict.QUEUED

    def waits(self, number: int) -> bool:
        return any(one == number for one, _ in self.waiting)

    @property
    def ready(self) -> int | None:
        """The number of the command that may start now; None: none may."""
        if self.running is None and self.waiting and self.waiting[0][0] == self.next:
            return self.next
        return None

    @property
    def has_gap(self) -> bool:
        """Return whether commands wait for one that has not come."""
        return self.running is None and bool(self.waiting) and self.ready is None

    def start(self) -> Lane:
        """Begin the command that is ready."""
        assert self.ready is not None
        return replace(self, next=self.next + 1, running=self.waiting[0], waiting=self.waiting[1:])

    def end(self) -> Lane:
        """The running command has a result, good or bad; the next one may run."""
        assert self.running is not None
        return replace(self, running=None, ended=(*self.ended, self.running))

    def give_up(self) -> tuple[Lane, tuple[int, ...]]:
        """Fail what waits behind a gap that nobody fills; what comes of the gap later is late."""
        if not self.has_gap:
            return self, ()
        failed = tuple(number for number, _ in self.waiting)
        return replace(self, next=failed[-1] + 1, waiting=(), ended=(*self.ended, *self.waiting)), failed

    def close(self) -> tuple[Lane, tuple[int, ...]]:
        """Take no more commands and fail those that wait; the running one ends by itself."""
        failed = tuple(number for number, _ in self.waiting)
        return replace(self, closed=True, waiting=(), ended=(*self.ended, *self.waiting)), failed

    def forget(self, number: int) -> Lane:
        """Remember the result of a command no more."""
        return replace(self, ended=tuple(one for one in self.ended if one[0] != number))


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of several parties: who was served last comes last, before newcomers.

    Newcomers come after those who wait: a tenant who makes a new snapshot for each sample would always be first.
    """

    order: tuple[str, ...] = ()

    def pick(self, ready: Collection[str]) -> tuple[Turns, str | None]:
        """The party of `ready` that was not served for longest; None if there is none."""
        newcomers = tuple(sorted(set(ready) - set(self.order)))
        order = (*self.order, *newcomers)
        chosen = next((one for one in order if one in ready), None)
        if chosen is None:
            return self, None
        return Turns((*(one for one in order if one != chosen), chosen)), chosen

    def without(self, party: str) -> Turns:
        return Turns(tuple(one for one in self.order if one != party))


@dataclass(frozen=True, slots=True)
class NestedTurns:
    """Turns of several parties, and of the members of each."""

    parties: Turns = Turns()
    members: Mapping[str, Turns] = field(default_factory=dict)

    def pick(self, ready: Mapping[str, Collection[str]]) -> tuple[NestedTurns, str | None]:
        """The member, of those in `ready` by party, whose turn it is; None if there is none."""
        parties, party = self.parties.pick(ready)
        if party is None:
            return self, None
        turns, member = self.members.get(party, Turns()).pick(ready[party])
        return NestedTurns(parties, {**self.members, party: turns}), member

    def without(self, party: str, member: str) -> NestedTurns:
        return replace(self, members={**self.members, party: self.members.get(party, Turns()).without(member)})


@dataclass(frozen=True, slots=True)
class Shifts:
    """The queues, of several, that are served at the same time: at most `places`, each for `most` pieces of work.

    A queue keeps its place while it has work, and beyond `most` pieces only if no other one waits for a place. A place
    is free once nothing of its queue runs.
    """

    places: int
    most: int
    done: Mapping[str, int] = field(default_factory=dict)  # queues that have a place -> pieces since they have it
    turns: Turns = Turns()

    def pick(self, waiting: Collection[str], running: Collection[str]) -> tuple[Shifts, str | None]:
        """The queue whose next piece of work may run; None: none may. `waiting`, `running`: queues that have any."""
        others = [name for name in waiting if name not in self.done]
        goes_on = {name for name in self.done if name in waiting and (self.done[name] < self.most or not others)}
        done = {name: count for name, count in self.done.items() if name in goes_on or name in running}
        allowed = [*goes_on, *(others if len(done) < self.places else ())]
        turns, chosen = self.turns.pick(allowed)
        if chosen is not None:
            done.setdefault(chosen, 0)
        return replace(self, done=done, turns=turns), chosen

    def count(self, queue: str, pieces: int) -> Shifts:
        """Note that so many pieces of a queue's work begin."""
        return replace(self, done={**self.done, queue: self.done[queue] + pieces})

    def without(self, queue: str) -> Shifts:
        """Forget whose turn it was; the queue may come again."""
        return replace(self, turns=self.turns.without(queue))
