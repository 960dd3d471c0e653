"""Publication to engines in this process that answer while the policy is trained, because they compute elsewhere.

    trainer's thread   take: every tensor --.     train                         take --.
    event loop         answers ............ '-> engine.update_weights, answers ......   '-> ...

The engine answers each request from weights of the request's own versions, so it keeps every version that open draws
may need (a service: all of the run, a name each), and nothing waits for answers to end.
"""

from __future__ import annotations

from collections.abc import Callable

from hone.weights.base import Source, VersionWeights
from hone.workers.rollout_role import InProcess


class Concurrent(InProcess):
    """Publication of which the trainer's thread does its part, so that the event loop goes on."""

    def take(self, source: Source, version: int, is_unchanged: Callable[[], bool]) -> VersionWeights:
        tensors = list(source.whole())
        return VersionWeights(version, Source(lambda: iter(tensors)), is_unchanged)
