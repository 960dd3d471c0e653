"""Choice of a free replica for a request: prefixes are computed once, and load stays even.

    turn of a trajectory     the replica that has the turns before it
    sample of a prompt       the least busy replica that has the prompt, while it is at most TOGETHER such requests
                             busier than the least busy of all; else that one, which then has the prompt too
    others                   the least busy replica

A replica is as busy as the tokens that its requests are expected to compute: prompts that it does not have yet, and
answers of average length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from hone.rollout.pending import PendingRequest
from hone.rollout.replicas import Replica

TOGETHER = 8  # requests by which the replica of a prompt may be busier than the least busy one
HOMES = 65_536  # trajectories, and prompts, whose replicas are remembered; the longest unused is forgotten
RECENT = 1 / 64  # weight of an answer in the average length

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RequestPlacement:
    """The replicas' prefixes and load, as far as the router knows them."""

    def __init__(self) -> None:
        self._trajectories: _Recent[str, Replica] = _Recent(HOMES)
        self._prompts: _Recent[int, list[Replica]] = _Recent(HOMES)
        self._answer_tokens: float | None = None  # average length

    def saw(self, answer_tokens: int) -> None:
        """Learn the length of an answer."""
        before = answer_tokens if self._answer_tokens is None else self._answer_tokens
        self._answer_tokens = before + (answer_tokens - before) * RECENT

    def move(self, requests: Sequence[PendingRequest], replica: Replica) -> None:
        """Have these requests, when they are sent again, and the later turns of their trajectories go to `replica`."""
        for request in requests:
            if request.trajectory:
                self._trajectories.put(request.trajectory, replica)

    def choose(self, request: PendingRequest, free: Sequence[Replica]) -> Replica:
        """Choose one of the `free` replicas, and note what the request will cost there."""
        prompt, length = hash(request.request.tokens), len(request.request.tokens)
        known = self._prompts.get(prompt) or []
        answer = request.request.sampling.max_tokens
        if self._answer_tokens is not None:
            answer = min(answer, round(self._answer_tokens))
        home = self._trajectories.get(request.trajectory)
        if home is not None and home in free:
            chosen, has_prefix = home, True
        else:
            chosen = _least_busy(free)
            if having := [one for one in known if one in free]:
                together = _least_busy(having)
                ahead = together.expected_tokens - chosen.expected_tokens
                chosen = together if ahead <= TOGETHER * (length + answer) else chosen
            has_prefix = chosen in known
        request.cost = answer + (0 if has_prefix else length)
        self._prompts.put(prompt, known if chosen in known else [*known, chosen])
        if request.trajectory:
            self._trajectories.put(request.trajectory, chosen)
        return chosen


class _Recent(Generic[K, V]):
    """A mapping that forgets the entries that were not used for longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._found.get(key)

    def put(self, key: K, value: V) -> None:
        self._found[key] = value
        self._found.move_to_end(key)
        if len(self._found) > self._most:
            self._found.popitem(last=False)


def _least_busy(replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda one: (one.expected_tokens, len(one.running)))


__all__ = ["RequestPlacement"]
