"""Window of the prompts that are drawn ahead of the trainer: the weights that answer each, and its fate.

    step s   collect   admitted(room(short))   draws at the end of the queue, answered from the newest version
                       taken(short)            draws at its head, in draw order, however late one of them is
             update    trained(s)              version s exists; a step without an update makes no version

After `admitted`, `short` + `staleness` x `per_step` draws are open. Step s takes `short` of them at least, every later
step `per_step`, always the oldest. So a draw that is admitted in step s is trained in step s + `staleness` at the
latest, and at most `staleness` updates lie between the weights that answered it and the weights that it trains.

`PromptLedger` checks that every draw is trained exactly once, or dropped with a reason:

    drawn -> in flight -> finished -> trained
                 |            \\----> dropped (why)
                 |\\--skipped (why)--> dropped
                 \\--put back-------> drawn again later, with the same number

It is part of the checkpoint. On restart, prompts that were drawn after the checkpoint are drawn again by the resumed
prompt stream, with the same numbers, so nothing is lost and nothing is trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from hone.config import ConfigError
from hone.schedule.seats import NEWEST
from hone.types import Versions

T = TypeVar("T")


class ScheduleError(RuntimeError):
    """The schedule of asynchronous training was broken: a bug, never a matter of load."""


@dataclass(frozen=True, slots=True)
class OpenDraw:
    """A prompt that was drawn and is not trained yet."""

    number: int
    step: int  # that admitted it
    versions: Versions  # that may sample it


@dataclass(frozen=True, slots=True)
class Window:
    """The open draws of a run. A value: every transition returns another window.

    >>> window = Window(staleness=1, per_step=2, steps=3)
    >>> window.room(2, step=1)  # two for this step, two ahead
    4
    >>> window = window.admitted([0, 1, 2, 3], step=1, short=2).taken(2).trained(1)
    >>> window = window.admitted([4, 5], step=2, short=2)
    >>> [(one.number, one.versions) for one in window.open]
    [(2, (0, 0)), (3, (0, 0)), (4, (1, 1)), (5, (1, 1))]
    """

    staleness: int  # most updates between the weights that sampled a token and the weights that it trains
    per_step: int  # draws that a step trains on
    steps: int  # of the run: nothing is drawn that would be trained after the last one
    one_version: bool = True  # an answer is sampled from one version: the newest at its admission
    versions: tuple[int, ...] = (0,)  # that a trained token may come from: the last `staleness` + 1, oldest first
    open: tuple[OpenDraw, ...] = ()  # in draw order

    @property
    def version(self) -> int:
        """Of the weights that are trained next: the step of the last update."""
        return self.versions[-1]

    def room(self, short: int, step: int) -> int:
        """Return the number of draws to admit in `step`, which still takes `short`."""
        ahead = min(self.staleness, self.steps - step) * self.per_step
        return max(short + ahead - len(self.open), 0)

    def admitted(self, numbers: Iterable[int], step: int, short: int) -> Window:
        """Open new draws in `step`, which still takes `short` draws.

        Raises ScheduleError if numbers do not increase, or if more than `short` + `staleness` x `per_step` are open: so
        many answers are kept in memory at the most, and the last of them would be trained too late.
        """
        first = len(self.open)
        drawn = tuple(
            OpenDraw(number, step, self._versions(place, short)) for place, number in enumerate(numbers, first)
        )
        together = (*self.open, *drawn)
        if any(a.number >= b.number for a, b in pairwise(together)):
            raise ScheduleError(f"draws are admitted out of order: {[one.number for one in together]}")
        return replace(self, open=together)

    def _versions(self, place: int, short: int) -> Versions:
        """The versions that may sample the draw at this place of the queue: none that is too old when it is trained."""
        later = max(place - short, -1) // self.per_step + 1  # steps until it is trained
        spare = self.staleness - later
        if spare < 0:
            raise ScheduleError(
                f"a draw at place {place} would be trained {later} steps later; with asynchrony.staleness = "
                f"{self.staleness}, {short + self.staleness * self.per_step} draws may be open"
            )
        if self.one_version:
            return self.version, self.version
        return self.versions[max(len(self.versions) - 1 - spare, 0)], NEWEST

    def taken(self, count: int) -> Window:
        """Close the `count` oldest draws: they are trained, or dropped with a reason."""
        if count > len(self.open):
            raise ScheduleError(f"{count} draws are taken, but only {len(self.open)} are open")
        return replace(self, open=self.open[count:])

    def withdrawn(self) -> Window:
        """Close the draws that a synchronous step did not need: their prompts go back to the stream.

        Raises ScheduleError with a staleness above 0, where later steps take them.
        """
        if self.staleness:
            raise ScheduleError(f"{len(self.open)} draws are withdrawn, but with staleness {self.staleness} they stay")
        return replace(self, open=())

    def reopened(self, numbers: Collection[int]) -> Window:
        """Let these open draws be answered from the newest version, because their answers were lost."""
        now = (self.version, self.version if self.one_version else NEWEST)
        return replace(self, open=tuple(replace(o, versions=now) if o.number in numbers else o for o in self.open))

    def trained(self, version: int) -> Window:
        """Note an update, which made `version`. A step without an update has no such call: its version stays."""
        if version <= self.version:
            raise ScheduleError(f"version {version} follows version {self.version}")
        return replace(self, versions=(*self.versions, version)[-self.staleness - 1 :])

    def ages(self, versions: Collection[int]) -> dict[int, int]:
        """Version -> updates since, for the versions that sampled a batch. Raises ScheduleError beyond the bound."""
        newest = len(self.versions) - 1
        late = sorted(set(versions) - set(self.versions))
        if late:
            raise ScheduleError(
                f"tokens of weight version {late[0]} were about to be trained, but only the versions "
                f"{', '.join(map(str, self.versions))} are within asynchrony.staleness = {self.staleness}"
            )
        return {version: newest - self.versions.index(version) for version in versions}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON-compatible data."""
        return {
            "staleness": self.staleness,
            "per_step": self.per_step,
            "versions": list(self.versions),
            "open": [[one.number, one.step, *one.versions] for one in self.open],
        }

    def restored(self, state: Mapping[str, Any]) -> Window:
        """The window of a checkpoint, under this one's settings.

        Raises ConfigError if these would train one of its open draws too late.
        """
        versions = tuple(state["versions"])
        opened = tuple(OpenDraw(number, step, (least, most)) for number, step, least, most in state["open"])
        for place, one in enumerate(opened):
            older = sum(version > one.versions[0] for version in versions)
            if (age := older + place // self.per_step) > self.staleness:
                raise ConfigError(
                    f"{len(opened)} prompts were drawn ahead by the run that is continued. With asynchrony.staleness = "
                    f"{self.staleness} and update.prompts_per_step = {self.per_step}, draw {one.number} would be "
                    f"trained {age} updates after the weights that answered it; set asynchrony.staleness="
                    f"{state['staleness']} and update.prompts_per_step={state.get('per_step', self.per_step)} as before"
                )
        return replace(self, versions=versions[-self.staleness - 1 :], open=opened)


@dataclass(frozen=True, slots=True)
class Enough:
    """Number of groups that a step needs, and the rule by which a group counts.

    Groups count in draw order: one that is complete early waits for those drawn before it. So which groups a step gets
    depends on their rewards alone, and long answers are used like short ones.
    """

    groups: int
    keeps: Callable[[Any], bool]

    def first(self, groups: Sequence[T]) -> list[T]:
        """The groups up to the one that makes it enough; all of them if it is not."""
        kept = accumulate(self.keeps(group) for group in groups)
        return list(groups[: next((place for place, count in enumerate(kept, 1) if count == self.groups), None)])


class LedgerError(RuntimeError):
    """A prompt was about to be trained twice, lost, or invented."""


class PromptLedger:
    """Counts what became of every draw, and lists the draws that are still open."""

    def __init__(self) -> None:
        self._next = 0  # draws below this number are settled or open
        self._open: dict[int, str] = {}  # draw -> "in flight" | "finished"
        self._trained = 0
        self._dropped: Counter[str] = Counter()

    def drawn(self, draws: Iterable[int]) -> None:
        """New draws go in flight; they must continue the numbering without a gap."""
        for draw in draws:
            if draw != self._next:
                raise LedgerError(f"draw {draw} follows draw {self._next - 1}: a prompt was skipped or repeated")
            self._next += 1
            self._open[draw] = "in flight"

    def finished(self, draws: Iterable[int]) -> None:
        for draw in draws:
            self._move(draw, "in flight", "finished")

    def trained(self, draws: Iterable[int]) -> None:
        for draw in draws:
            self._move(draw, "finished", None)
            self._trained += 1

    def trained_all_finished(self, ahead: Collection[int] = ()) -> None:
        """End a step: mark all finished draws as trained. Raises LedgerError if other draws than `ahead` stay open."""
        self.trained([draw for draw, state in self._open.items() if state == "finished"])
        self.require_settled(ahead)

    def dropped(self, draws: Iterable[int], reason: str) -> None:
        for draw in draws:
            self._move(draw, "finished", None)
            self._dropped[reason] += 1

    def skipped(self, draws: Iterable[int], reason: str) -> None:
        """Drop draws before they are played."""
        for draw in draws:
            self._move(draw, "in flight", None)
            self._dropped[reason] += 1

    def put_back(self, first: int, skipped: int = 0, reason: str = "") -> None:
        """Forget the draws from number `first` on: their prompts go back to the stream, and are drawn again.

        `skipped` of them were skipped for `reason`. Raises LedgerError if another one is not in flight.
        """
        played = [draw for draw in self._open if draw >= first]
        if len(played) + skipped != self._next - first:
            raise LedgerError(
                f"draws {first} to {self._next - 1} go back to the data, but of these only {len(played)} are open and "
                f"{skipped} were skipped"
            )
        for draw in played:
            self._move(draw, "in flight", None)
        self._dropped -= Counter({reason: skipped})
        self._next = first

    def require_settled(self, ahead: Collection[int] = ()) -> None:
        """Raise LedgerError if other draws are open than `ahead`, which later steps take."""
        if lost := sorted(self._open.keys() - set(ahead)):
            raise LedgerError(f"draws {lost[:8]} were neither trained nor dropped")
        if invented := sorted(set(ahead) - self._open.keys()):
            raise LedgerError(f"draws {invented[:8]} are still played, but they were trained or dropped before")

    @property
    def counts(self) -> dict[str, int]:
        """Totals since the run began: drawn, trained, open, and dropped by reason."""
        reasons = {f"dropped: {reason}": count for reason, count in sorted(self._dropped.items())}
        return {"drawn": self._next, "trained": self._trained, "open": len(self._open), **reasons}

    def _move(self, draw: int, before: str, after: str | None) -> None:
        found = self._open.get(draw)
        if found != before:
            raise LedgerError(f"draw {draw} is {found or 'not open'}, expected it {before}")
        if after is None:
            del self._open[draw]
        else:
            self._open[draw] = after

    def state_dict(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "open": {str(draw): state for draw, state in self._open.items()},
            "trained": self._trained,
            "dropped": dict(self._dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._open = {int(draw): found for draw, found in state["open"].items()}
        self._trained = state["trained"]
        self._dropped = Counter(state["dropped"])


__all__ = ["Enough", "LedgerError", "OpenDraw", "PromptLedger", "ScheduleError", "Window"]
