"""The prompt ledger: every prompt drawn is trained exactly once, or dropped with a reason.

    drawn -> in flight -> finished -> trained
                 |            \\----> dropped (why)
                 \\--skipped (why)--> dropped

The ledger is part of the checkpoint. On restart, draws that were in flight after the checkpoint are drawn again by the
resumed prompt stream, with the same numbers, so nothing is lost and nothing is trained twice. A transition that the
picture does not have is a bug in the trainer and raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


class LedgerError(RuntimeError):
    """A prompt was about to be trained twice, lost, or invented."""


class PromptLedger:
    """Counts what became of every draw, and knows the open ones by number."""

    def __init__(self) -> None:
        self._next = 0  # every draw below is settled or open
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

    def trained_all_finished(self) -> None:
        """A synchronous step ends: whatever it finished and did not drop is trained; nothing may still be open."""
        self.trained([draw for draw, state in self._open.items() if state == "finished"])
        self.require_settled()

    def dropped(self, draws: Iterable[int], reason: str) -> None:
        for draw in draws:
            self._move(draw, "finished", None)
            self._dropped[reason] += 1

    def skipped(self, draws: Iterable[int], reason: str) -> None:
        """Drop draws before they are played."""
        for draw in draws:
            self._move(draw, "in flight", None)
            self._dropped[reason] += 1

    def require_settled(self) -> None:
        """Raise LedgerError if a draw is still open: called where a synchronous step ends."""
        if self._open:
            raise LedgerError(f"draws {sorted(self._open)[:8]} were neither trained nor dropped")

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
