"""The simulated servers of a run: which answer gets a seat where, and which server takes which weights when.

    ask --> waiting answers, by the versions they may be sampled from --> seat at the least busy server --> ended
    publish --> kept versions --> `schedule.seats.moves` --> one send at a time, to all servers that may take it

The decisions are the run's own: `moves`, `needed` and `fits` of `hone.schedule.seats`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from hone.planner.costs import Costs
from hone.planner.replica import Answer, SimulatedReplica, count_down
from hone.schedule.seats import Standing, fits, moves, needed
from hone.types import Versions

Later = Callable[[float, Callable[[float], None]], None]
"""Call a function with the time, at that time."""

_Class = tuple[int, frozenset[Versions]]


class Fleet:
    """Servers that have proven version 0."""

    def __init__(self, replicas: Sequence[SimulatedReplica], seats: int, costs: Costs, keeps_cache: bool) -> None:
        self.replicas = replicas
        self.later: Later = lambda _time, _call: None
        self.ended: Callable[[Answer, float], None] = lambda _answer, _now: None
        self._seats = seats
        self._send_s = costs.send_s
        self._keeps_cache = keeps_cache
        self._waiting: dict[Versions, deque[Answer]] = {}
        self._held: Counter[Versions] = Counter()
        self._open: Counter[int] = Counter()  # draw -> answers that have not ended
        self._kept = {0}
        self._sending = False
        self._free: dict[int, list[tuple[int, int]]] = {}  # version -> (running answers, server), some out of date
        self._classes: dict[_Class, dict[int, None]] = {}
        self._class_of: dict[int, _Class] = {}
        for place, one in enumerate(replicas):
            one.version = 0
            self._changed(place)

    def ask(self, answers: Iterable[Answer], now: float) -> None:
        """Queue answers; each gets a seat at a server that may sample it, in order."""
        for one in answers:
            if one.draw not in self._open:
                self._held[one.versions] += 1
            self._open[one.draw] += 1
            self._waiting.setdefault(one.versions, deque()).append(one)
        self._hand_out(now)

    def publish(self, version: int, now: float) -> None:
        """Keep the weights of this version, and send them to the servers that may take them."""
        self._kept.add(version)
        self._look(now)

    # ------------------------------------------------------------------------------------------------ seats

    def _hand_out(self, now: float) -> None:
        begun: set[int] = set()
        for versions in list(self._waiting):
            waiting = self._waiting[versions]
            while waiting and (place := self._least_busy(versions)) is not None:
                self.replicas[place].begin(waiting.popleft(), now)
                self._changed(place)
                begun.add(place)
            if not waiting:
                del self._waiting[versions]
        for place in sorted(begun):
            self._plan(place)
        self._look(now)

    def _least_busy(self, versions: Versions) -> int | None:
        found: list[tuple[int, int]] = []
        for version, free in self._free.items():
            while free and not self._is_free(version, *free[0]):
                heappop(free)
            if free and fits(version, versions):
                found.append(free[0])
        return min(found)[1] if found else None

    def _is_free(self, version: int, running: int, place: int) -> bool:
        one = self.replicas[place]
        return one.version == version and len(one.running) == running and not one.is_receiving

    def _plan(self, place: int) -> None:
        """Come back when the next answer of a server ends, unless something changes there before."""
        one = self.replicas[place]
        plan, time = one.plan, one.next_end()
        if time is not None:
            self.later(time, lambda now: self._end(place, now) if one.plan == plan else None)

    def _end(self, place: int, now: float) -> None:
        for answer in self.replicas[place].end_answers(now):
            count_down(self._open, answer.draw)
            if answer.draw not in self._open:
                count_down(self._held, answer.versions)
            self.ended(answer, now)
        self._changed(place)
        self._plan(place)
        self._hand_out(now)

    # ---------------------------------------------------------------------------------------------- weights

    def _look(self, now: float) -> None:
        """Send a version, if servers may take one and nothing is being sent."""
        if self._sending:
            return
        found = self._moves()
        if found:
            version = min(found.values())
            self._send([place for place, one in found.items() if one == version], version, now)
        self._kept &= needed([*self._held, *self._waiting], self._kept)

    def _send(self, places: Sequence[int], version: int, now: float) -> None:
        self._sending = True
        for place in places:
            self.replicas[place].receive(now)

        def arrived(then: float) -> None:
            self._sending = False
            for place in places:
                self.replicas[place].serve(version, then, self._keeps_cache)
                self._changed(place)
                self._plan(place)
            self._hand_out(then)

        self.later(now + self._send_s, arrived)

    def _moves(self) -> dict[int, int]:
        """Server -> version that it takes now.

        Servers with the same version and the same ranges are alike, so `moves` decides for a few of each class: one for
        every waiting range, which may need a server of its own, one for the crowd, and the last one, which may have to
        stay for the draws that need its version.
        """
        newest = max(self._kept)
        waiting = list(self._waiting)
        if not waiting and all(version == newest for version, _ in self._classes):
            return {}
        standings: list[Standing] = []
        crowd: dict[str, list[int]] = {}
        for (version, ranges), members in self._classes.items():
            places, apart = list(members), len(waiting)
            middle = places[apart:-1]
            few = [*places[:apart], *middle[:1], *places[apart:][-1:]]
            standings += [Standing(str(place), version, ranges) for place in few]
            if middle:
                crowd[str(middle[0])] = middle
        found = moves(standings, waiting, self._held, self._kept)
        return {place: version for name, version in found.items() for place in crowd.get(name, [int(name)])}

    def _changed(self, place: int) -> None:
        """Note the state of a server after a change."""
        one = self.replicas[place]
        if len(one.running) < self._seats and not one.is_receiving:
            heappush(self._free.setdefault(one.version, []), (len(one.running), place))
        now = (one.version, frozenset(one.ranges))
        before = self._class_of.get(place)
        if before == now:
            return
        if before is not None:
            del self._classes[before][place]
            if not self._classes[before]:
                del self._classes[before]
        self._class_of[place] = now
        self._classes.setdefault(now, {})[place] = None


__all__ = ["Fleet", "Later"]
