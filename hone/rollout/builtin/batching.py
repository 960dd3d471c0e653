"""Continuous batching: which requests run in which row of the KV cache, and one token for all of them per step.

    queue --refill--> rows (holes that finished requests left first) --prefill, shared between equal prompts--+
      ^                                                                                                       v
      +--evict (weights or cache went away: tokens are kept, KV is computed anew)--  rows  <--step: one token per row
                                                                                       |
                                                                                       v finished requests

Prefill covers all but the last token of a sequence; that one is read by the row's first step. So tokens are sampled in
one place, and a row can start from KV copied from a row with the same prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hone.data.routes import Routes
from hone.models.routing import Routing, watched
from hone.rollout.builtin.cache import COLUMN_STEP, KVCache, PackedPrompts, Step, rounded
from hone.rollout.builtin.decoder import Decoder
from hone.rollout.builtin.requests import HostRows, Request
from hone.rollout.builtin.sampling import sample
from hone.types import StopReason


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits of the prompts that are computed together; see `BuiltinSettings`."""

    tokens_at_once: int
    share_prompts: bool


@dataclass(slots=True)
class Counters:
    """Counts since the last call of `metrics`."""

    steps: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0


class RunningBatch:
    """The requests that are being decoded. Row i of the cache, the host arrays and the logits belongs to request i."""

    def __init__(self, decoder: Decoder, cache: KVCache, prefill: PrefillLimits) -> None:
        self.weight_version = -1
        self.counters = Counters()
        self._decoder = decoder
        self.cache = cache
        self._prefill = prefill
        self._requests: list[Request | None] = []  # None: a hole
        self._host = HostRows()
        self._sharers: dict[tuple[int, ...], list[Request]] = {}  # prompt -> running requests that have it

    @property
    def running(self) -> list[Request]:
        return [request for request in self._requests if request is not None]

    def __len__(self) -> int:
        return len(self._requests) - self._requests.count(None)

    # ------------------------------------------------------------------------------------------------ coming in

    def refill(self, queue: deque[Request], adapter: str = "") -> None:
        """Take as many requests from the front of the queue as there is room for, and prefill them.

        It stops at the first one that wants another adapter than `adapter`, which is merged into the weights now.
        """
        holes = [row for row, request in enumerate(self._requests) if request is None]
        live = len(self._requests) - len(holes)
        before = len(self._requests)
        columns = _rounded_room(max((request.room for request in self.running), default=0)) if queue else 0
        placed: list[Request] = []
        while queue and queue[0].sampling.adapter == adapter and live + len(placed) < self.cache.limits.rows:
            wanted = max(columns, _rounded_room(queue[0].room))
            if live + len(placed) and (live + len(placed) + 1) * wanted > self.cache.limits.tokens:
                break
            columns = wanted
            request = queue.popleft()
            request.row = holes.pop(0) if holes else len(self._requests)
            if request.row == len(self._requests):
                self._requests.append(None)
            request.seat.end()
            placed.append(request)
            self._requests[request.row] = request
        self._close(holes)
        if placed:
            fresh, copies = self._sources(placed)
            self.cache.reserve(len(self._requests), columns, live_rows=min(before, len(self._requests)) if live else 0)
            self._fill(fresh, copies)

    def _close(self, holes: list[int]) -> None:
        """Move the last rows into the holes that are left, so that running rows lie together."""
        for hole in holes:
            while self._requests and self._requests[-1] is None:
                self._requests.pop()
            if hole >= len(self._requests):
                return
            last = self._requests.pop()
            assert last is not None
            self.cache.move_row(last.row, hole, int(self._host.position[last.row]))
            self._host.move(last.row, hole)
            self._requests[hole] = last
            last.row = hole

    def _sources(self, placed: list[Request]) -> tuple[list[list[Request]], list[tuple[Request, list[Request]]]]:
        """Return the sources of new rows' KV: groups that share one prefill, and (running row, rows to copy it to)."""
        fresh: dict[tuple[Any, ...], list[Request]] = {}
        copies: list[tuple[Request, list[Request]]] = []
        share = self._prefill.share_prompts
        for request in placed:
            self._host.place(request.row, request)
            sequence = request.sequence
            request.kv_version = self.weight_version
            same = [one for one in self._sharers.get(sequence, []) if one.kv_version == self.weight_version]
            donors = [one for one in same if one.can_share_with(request)] if share and self.cache.copies_running else []
            if len(sequence) > 1 and donors:
                copies.append((donors[0], [request]))
            elif len(sequence) > 1:
                key = (*request.root, request.sampling.keep_kv, request.images, *sequence)
                fresh.setdefault(key if share else (request.row, *key), []).append(request)
        for request in placed:
            self._sharers.setdefault(request.prompt, []).append(request)
            self.counters.recomputed_tokens += len(request.tokens)
        return list(fresh.values()), copies

    def _fill(self, fresh: list[list[Request]], copies: list[tuple[Request, list[Request]]]) -> None:
        """Write the KV of every new row, up to its sequence's last token but one."""
        for requests in fresh:
            first = requests[0]
            known = first.reusable if first.sampling.keep_kv else ()
            first.cached, routes = self.cache.recall(first.root, known, first.row)
            self.counters.cached_tokens += first.cached
            if routes is not None:
                first.record_experts(0, routes)
        for chunk in self._chunks([requests[0] for requests in fresh if requests[0].missing]):
            sequences = [request.sequence[request.cached : -1] for request in chunk]
            rows, starts = [request.row for request in chunk], [request.cached for request in chunk]
            routing = self._routing(chunk)
            with nullcontext() if routing is None else watched(routing):
                images = [request.images for request in chunk]
                blocks = [request.sampling.keep_kv for request in chunk]
                prompts = PackedPrompts.of(sequences, rows, self.cache.device, images, starts, blocks)
                self._decoder.prefill(prompts, self.cache)
            if routing is not None:
                ends = np.cumsum([len(sequence) for sequence in sequences])
                for request, routes in zip(chunk, np.split(_on_host(routing, int(ends[-1])), ends[:-1]), strict=True):
                    if request.sampling.routed_experts:
                        request.record_experts(request.cached, routes)
            self.counters.prefilled_tokens += sum(map(len, sequences))
        for donor, others in [*copies, *((first, others) for first, *others in fresh if others)]:
            columns = len(others[0].sequence) - 1
            targets = torch.tensor([request.row for request in others], device=self.cache.device)
            self.cache.copy_row(donor.row, targets, columns)
            for request in others:
                if request.sampling.routed_experts and donor.routes is not None:
                    request.record_experts(0, donor.routes[:columns])
            self.counters.shared_tokens += columns * len(others)

    def _routing(self, requests: list[Request]) -> Routing | None:
        """Records experts during a forward of these requests; None if no request wants them."""
        routers = self._decoder.routers
        if routers is None or not any(request.sampling.routed_experts for request in requests):
            return None
        self._host.keep_routes(routers.layers, routers.top_k)
        return Routing(routers)

    def _chunks(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Requests whose prefills fit the token budget together; one that is longer goes alone."""
        chunk: list[Request] = []
        tokens = 0
        for request in requests:
            if chunk and tokens + request.missing > self._prefill.tokens_at_once:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(request)
            tokens += request.missing
        if chunk:
            yield chunk

    # ------------------------------------------------------------------------------------------------- decoding

    def step(self) -> list[tuple[Request, StopReason]]:
        """Produce one token for every running request; returns the finished ones, which leave the batch.

        Raises RuntimeError if the model's probabilities are not finite.
        """
        rows = len(self._requests)
        host = self._host
        routing = self._routing(self.running)
        with nullcontext() if routing is None else watched(routing):
            step = Step.of(host.token[:rows], host.position[:rows], host.shift[:rows], self.cache)
            logits = self._decoder.decode(step, self.cache)
        routes = None if routing is None else _on_host(routing, rows)
        drawn, drawn_logprobs = sample(logits, host.rules(rows), host.uniforms(rows))
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.float().cpu().numpy()
        if not np.isfinite(logprobs).all():
            bad = self._requests[int(np.flatnonzero(~np.isfinite(logprobs))[0])]
            assert bad is not None
            raise RuntimeError(
                f"the model's probabilities for request {bad.request_id!r} are not finite "
                f"(weight version {self.weight_version})"
            )
        stopped, full = host.record(rows, tokens, logprobs, routes)
        for row, request in enumerate(self._requests):
            if request is not None and request.stop_strings is not None and not stopped[row]:
                stopped[row] = request.stop_strings.completed_by(request.tokens + host.collect(row)[0])
        self.counters.steps += 1
        self.counters.tokens += rows
        ended = np.flatnonzero(stopped | full).tolist()
        return [(self._leave(row, keep=True), StopReason.STOP if stopped[row] else StopReason.LENGTH) for row in ended]

    # ------------------------------------------------------------------------------------------------ going out

    def drop(self, request: Request) -> None:
        """Remove a request; it keeps its tokens."""
        self._leave(request.row)

    def evict(self) -> list[Request]:
        """Remove every request, in the order of rows, to prefill them again."""
        return [self._leave(request.row) for request in self.running]

    def keep(self) -> None:
        """Let every request go on with the KV that it has: new weights come, and its tokens so far are of the old."""
        for request in self.running:
            request.stamp(int(self._host.produced[request.row]), self.weight_version)

    def abandon(self) -> list[Request]:
        """Remove every request without the tokens of its row, which a failed step may have left inconsistent."""
        requests = self.running
        self._requests, self._host = [], HostRows()
        self._sharers.clear()
        for request in requests:
            request.row = -1
        return requests

    def _leave(self, row: int, keep: bool = False) -> Request:
        request = self._requests[row]
        assert request is not None
        if keep and request.sampling.keep_kv and request.kv_version == self.weight_version:
            self.cache.keep(request.root, request.reusable, row, request.routes)
        if request.sampling.routed_experts and self._host.produced[row]:
            request.record_experts(len(request.sequence) - 1, self._host.collect_routes(row))
        request.extend(*self._host.collect(row), self.weight_version)
        request.row = -1
        self._requests[row] = None
        sharers = self._sharers[request.prompt]
        sharers.remove(request)
        if not sharers:
            del self._sharers[request.prompt]
        return request


def _on_host(routing: Routing, tokens: int) -> Routes:
    """The experts of the first `tokens` tokens of a forward; the rest is padding."""
    routes: Routes = routing.choices()[:tokens].cpu().numpy()
    return routes


def _rounded_room(tokens: int) -> int:
    return rounded(tokens, COLUMN_STEP)
