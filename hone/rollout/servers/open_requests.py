"""The requests that a server has at the moment, and the figures of those that ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hone.types import Completion, Metric, Metrics, StopReason


@dataclass
class _Counts:
    """Since the last call of `metrics`."""

    tokens: int = 0
    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0  # with at least one request open


class OpenRequests:
    """Ids of open requests; each may be open once."""

    def __init__(self, server: str) -> None:
        self.ids: set[str] = set()
        self._server = server
        self._counts = _Counts()
        self._busy_since = 0.0

    @contextmanager
    def opened(self, request_id: str) -> Iterator[None]:
        """Raises ValueError for an id that is open already."""
        if request_id in self.ids:
            raise ValueError(f"request {request_id!r} is already running on {self._server}")
        if not self.ids:
            self._busy_since = time.perf_counter()
        self.ids.add(request_id)
        try:
            yield
        finally:
            self.ids.discard(request_id)
            if not self.ids:
                self._counts.busy_s += time.perf_counter() - self._busy_since

    def count(self, completion: Completion, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a completion; `cached_tokens` of its prompt came from the prefix cache."""
        self._counts.requests += 1
        self._counts.tokens += len(completion.token_ids)
        self._counts.aborted += completion.stop_reason is StopReason.ABORTED
        self._counts.prompt_tokens += prompt_tokens
        self._counts.cached_tokens += cached_tokens

    def metrics(self) -> Metrics:
        """Figures of the completions since the last call."""
        if self.ids:
            now = time.perf_counter()
            self._counts.busy_s += now - self._busy_since
            self._busy_since = now
        counts, self._counts = self._counts, _Counts()
        found = {
            "rollout/tokens": Metric.sum(counts.tokens),
            "rollout/prefill_tokens": Metric.sum(counts.prompt_tokens - counts.cached_tokens),
            "rollout/cached_prompt_tokens": Metric.sum(counts.cached_tokens),
            "rollout/requests": Metric.sum(counts.requests),
            "rollout/aborted": Metric.sum(counts.aborted),
            "perf/rollout_busy_seconds": Metric.sum(counts.busy_s),
        }
        if counts.busy_s and counts.tokens:
            found["perf/rollout_tokens_per_s"] = Metric.mean(counts.tokens / counts.busy_s, counts.busy_s)
        return found


__all__ = ["OpenRequests"]
