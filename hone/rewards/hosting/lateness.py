"""Words about rewards that a step waits for: one line a minute, and the reason why calls are passed over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

LOG = logging.getLogger("hone.rewards")
TELL_S = 60.0
LATE_IN_A_ROW = 32  # calls of a component; then the other calls of the step are passed over
PROBES = 8  # late calls of each later step, before the others are passed over again


def tell(counts: Callable[[], tuple[int, int, int]], closing: threading.Event) -> None:
    """Say once a minute how far the rewards are, while some calls take longer than that. Returns when the pool closes.

    `counts`: calls so far, those that have ended, and those that had no answer in time.
    """
    asked_before = ended_before = late_before = 0
    while not closing.wait(TELL_S):
        asked, ended, late = counts()
        if ended < asked_before:  # not all calls of a minute ago have ended
            LOG.warning(
                "rewards: %d calls are open; %d ended in the last %g s, %d of them without an answer in time",
                asked - ended,
                ended - ended_before,
                TELL_S,
                late - late_before,
            )
        asked_before, ended_before, late_before = asked, ended, late


def why_passed_over(component: str, timeout_s: float) -> str:
    """Return the error of a call that is not made."""
    key = f"reward.components.{component}.timeout_s"
    return (
        f"not asked, because {LATE_IN_A_ROW} calls in a row had no answer within {key} = {timeout_s:g}; raise it, or "
        "try the function with hone score"
    )


__all__ = ["LATE_IN_A_ROW", "PROBES", "tell", "why_passed_over"]
