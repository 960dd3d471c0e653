"""A simulated rollout server: its running answers advance together, one token for each in every decode step.

Time is continuous. Between two events the number of running answers n is constant, and a decode step takes
`decode_s` + n x `decode_row_s`. An answer that joins does not wait for the end of the current decode step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeVar

from hone.planner.costs import Costs
from hone.types import Versions

K = TypeVar("K", bound=Hashable)

ROUNDING = 1e-9  # decode steps


@dataclass(slots=True)
class Answer:
    """An answer that is to be generated."""

    draw: int
    length: int  # in tokens
    versions: Versions  # that may sample it
    began: float = 0.0  # decode steps of its replica when it began, or when its last span did
    spans: list[tuple[int, int]] = field(default_factory=list)  # version, tokens

    @property
    def tokens(self) -> int:
        """Tokens of the spans that have ended."""
        return sum(count for _, count in self.spans)


class SimulatedReplica:
    """One server. `now` in its methods never decreases."""

    def __init__(self, costs: Costs, prompt_tokens: int) -> None:
        self.version = -1
        self.is_receiving = False
        self.running: dict[int, Answer] = {}  # by its number, in the order in which they began
        self.ranges: Counter[Versions] = Counter()  # of the running answers
        self.plan = 0  # changes whenever the next end does
        self._costs = costs
        self._prompt_tokens = prompt_tokens
        self._prompts: Counter[int] = Counter()  # draws of the running answers
        self._ends: list[tuple[float, int]] = []  # decode steps at which each answer ends, and its number
        self._numbers = 0
        self._now = 0.0
        self._busy_s = 0.0  # with at least one answer
        self._ready = 0.0  # end of the prefill, or of the reception of weights, that holds decoding up
        self._steps = 0.0  # decode steps since the simulation began

    def begin(self, answer: Answer, now: float) -> None:
        """Let an answer join; the first one to a prompt computes the prompt's KV cache for all."""
        self._advance(now)
        if not self._prompts[answer.draw]:
            self._hold_up(self._prompt_tokens * self._costs.prefill_token_s)
        self._prompts[answer.draw] += 1
        self._numbers += 1
        answer.began = self._steps
        self.running[self._numbers] = answer
        self.ranges[answer.versions] += 1
        heappush(self._ends, (self._steps + answer.length - answer.tokens, self._numbers))
        self.plan += 1

    def next_end(self) -> float | None:
        """When the next answer ends, if nothing joins until then; None: nothing runs, or weights arrive first."""
        if not self._ends or self.is_receiving:
            return None
        left = max(self._ends[0][0] - self._steps, 0.0)
        return max(self._now, self._ready) + left * self._step_s

    def end_answers(self, now: float) -> list[Answer]:
        """Remove and return the answers that end at `now`, which `next_end` gave."""
        self._advance(now)
        ended: list[Answer] = []
        self._steps = max(self._steps, self._ends[0][0])  # exact, whatever rounding did to the clock
        while self._ends and self._ends[0][0] <= self._steps:
            answer = self.running.pop(heappop(self._ends)[1])
            answer.spans.append((self.version, answer.length - answer.tokens))
            count_down(self.ranges, answer.versions)
            count_down(self._prompts, answer.draw)
            ended.append(answer)
        self.plan += 1
        return ended

    def receive(self, now: float) -> None:
        """Stand still while weights arrive."""
        self._advance(now)
        self.is_receiving = True
        self.plan += 1

    def serve(self, version: int, now: float, keeps_cache: bool) -> None:
        """Go on with new weights, after the KV cache of running answers was computed again, if it is not kept."""
        self._advance(now)
        self.is_receiving = False
        for answer in self.running.values():
            done = min(int(self._steps - answer.began + ROUNDING), answer.length - answer.tokens - 1)
            if done > 0:
                answer.spans.append((self.version, done))
                answer.began += done
            if not keeps_cache:
                self._hold_up(answer.tokens * self._costs.prefill_token_s)
        if not keeps_cache:
            self._hold_up(len(self._prompts) * self._prompt_tokens * self._costs.prefill_token_s)
        self.version = version
        self.plan += 1

    def busy_until(self, now: float) -> float:
        """The seconds until `now` in which there was an answer."""
        self._advance(now)
        return self._busy_s

    @property
    def _step_s(self) -> float:
        return self._costs.decode_s + len(self.running) * self._costs.decode_row_s

    def _hold_up(self, seconds: float) -> None:
        self._ready = max(self._ready, self._now) + seconds

    def _advance(self, now: float) -> None:
        if self.running:
            self._busy_s += now - self._now
            decoding = now - max(self._now, self._ready)
            if decoding > 0 and not self.is_receiving:
                self._steps += decoding / self._step_s
        self._now = now


def count_down(counts: Counter[K], key: K) -> None:
    """Count one less, and forget a key whose count is 0."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


__all__ = ["Answer", "SimulatedReplica", "count_down"]
