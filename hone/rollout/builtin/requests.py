"""Requests of the built-in engine, and the rows of the running batch that they are decoded in.

`Request` lives from the call of `generate` to its completion; `HostRows` has the state of each row as arrays, so that a
step's bookkeeping is a few array operations.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.data.routes import Routes
from hone.deadline import SeatWait
from hone.rollout.builtin.prefixes import Root
from hone.rollout.builtin.sampling import Rules, stream_of, uniforms
from hone.rollout.images import PlacedImages
from hone.types import Completion, SamplingParams, StopReason

_NO_TOKEN = -1
_MARGIN = 8  # tokens decoded before the ones that can hold the stop string, so that those decode as they do in place


class StopStrings:
    """Finds the token that completes a stop string."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Any) -> None:
        self._stop = stop
        self._tokenizer = tokenizer
        self.window = max(len(text.encode()) for text in stop) + _MARGIN  # a token holds at least one byte of text
        self._can_end: dict[int, bool] = {}

    def completed_by(self, tokens: list[int]) -> bool:
        """Return whether the last token completes a stop string in `tokens`; reads the last `window`."""
        if not self._may_end_with(tokens[-1]):
            return False
        text = self._decode(tokens[-self.window :])
        return any(stop in text for stop in self._stop)

    def _may_end_with(self, token: int) -> bool:
        """Return whether a token's text has the last character of a stop string (or a part of a character); cached."""
        if token not in self._can_end:
            text = self._decode([token])
            ends = {stop[-1] for stop in self._stop}
            self._can_end[token] = "\ufffd" in text or any(end in text or end.isspace() for end in ends)
        return self._can_end[token]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@dataclass(slots=True, eq=False)
class Request:
    """One `generate` call from its arrival until its future has a result."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    limit: int  # generated tokens at most
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings | None = None
    images: PlacedImages = ()
    shift: int = 0  # position after the images minus index in the sequence
    row: int = -1  # in the running batch; -1: waiting
    kv_version: int = -1  # weights that computed the KV of its prompt
    cached: int = 0  # tokens whose KV was kept from earlier requests
    tokens: list[int] = field(default_factory=list)  # generated before the last eviction; so are logprobs and versions
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None  # experts of the first tokens of the sequence, if requested
    seat: SeatWait = field(default_factory=SeatWait)  # the wait for a row

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens) if self.tokens else self.prompt

    @property
    def missing(self) -> int:
        """Number of tokens to prefill."""
        return len(self.sequence) - 1 - self.cached

    @property
    def reusable(self) -> tuple[int, ...]:
        """Tokens whose KV may be kept: those that a prefill writes, and none of a prompt with images."""
        return () if self.images else self.sequence[:-1]

    @property
    def root(self) -> Root:
        """Return the facts besides tokens and weights on which KV depends."""
        return self.sampling.adapter, self.sampling.routed_experts, self.sampling.cache_owner

    @property
    def room(self) -> int:
        """Columns of the KV cache that it needs at most."""
        return len(self.prompt) + self.limit

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.stamp(0, version)

    def stamp(self, produced: int, version: int) -> None:
        """Note the weights of the tokens that have none yet; its row has produced so many beyond `tokens`."""
        self.versions += [version] * (len(self.tokens) + produced - len(self.versions))

    def can_share_with(self, other: Request) -> bool:
        """Return whether the KV of this prompt can serve `other`, which has the same one: the same images and owner,
        computed in the same blocks, and recorded experts if `other` wants them."""
        mine, theirs = ((one.images, one.sampling.keep_kv, one.sampling.cache_owner) for one in (self, other))
        return mine == theirs and (self.sampling.routed_experts or not other.sampling.routed_experts)

    @property
    def tokens_with_experts(self) -> int:
        """Return the number of tokens whose experts are recorded, from the first token on."""
        return 0 if self.routes is None else len(self.routes)

    def record_experts(self, start: int, routes: Routes) -> None:
        """Record the experts of tokens `start`, `start + 1` ...; those that are recorded already are kept."""
        known = self.tokens_with_experts
        if start > known:
            raise RuntimeError(f"request {self.request_id!r}: the experts of token {known} were not recorded")
        new = routes[known - start :]
        self.routes = new if self.routes is None else np.concatenate([self.routes, new])

    def finish(self, reason: StopReason) -> None:
        if not self.future.done():
            self.future.set_result(
                Completion(
                    request_id=self.request_id,
                    token_ids=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    weight_versions=tuple(self.versions),
                    stop_reason=reason,
                    routed_experts=self.routes,
                )
            )

    def fail(self, message: str, cause: BaseException | None) -> None:
        if not self.future.done():
            error = RuntimeError(f"request {self.request_id!r}: {message}")
            error.__cause__ = cause
            self.future.set_exception(error)


# ----------------------------------------------------------------------------------------------------------- rows


def _integers() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _floats() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


def _bits() -> NDArray[np.uint64]:
    return np.zeros(0, np.uint64)


@dataclass(slots=True)
class HostRows:
    """State per row; arrays grow as rows are added."""

    token: NDArray[np.int64] = field(default_factory=_integers)  # what the row reads in the next step
    position: NDArray[np.int64] = field(default_factory=_integers)  # of that token in its sequence
    shift: NDArray[np.int64] = field(default_factory=_integers)  # how far the model's position is ahead of that
    produced: NDArray[np.int64] = field(default_factory=_integers)  # tokens since the row was placed
    allowed: NDArray[np.int64] = field(default_factory=_integers)  # tokens from then on, at most
    temperature: NDArray[np.float32] = field(default_factory=_floats)
    top_k: NDArray[np.int64] = field(default_factory=_integers)
    top_p: NDArray[np.float32] = field(default_factory=_floats)
    min_p: NDArray[np.float32] = field(default_factory=_floats)
    stream: NDArray[np.uint64] = field(default_factory=_bits)
    stop_ids: NDArray[np.int64] = field(default_factory=lambda: np.full((0, 1), _NO_TOKEN, np.int64))
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 64), np.int64))  # produced, per row
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 64), np.float32))
    routes: NDArray[np.int16] = field(default_factory=lambda: np.zeros((0, 64, 0, 0), np.int16))  # of tokens read

    def place(self, row: int, request: Request) -> None:
        """Begin a row: the last token of the sequence is read next, those before it are in the KV cache."""
        self._grow(row + 1, len(request.stop_ids))
        sampling, sequence = request.sampling, request.sequence
        self.token[row] = sequence[-1]
        self.position[row] = len(sequence) - 1
        self.shift[row] = request.shift
        self.produced[row] = 0
        self.allowed[row] = request.limit - len(request.tokens)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.stream[row] = stream_of(sampling.seed)
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids

    def _grow(self, rows: int, stop_ids: int) -> None:
        if stop_ids > self.stop_ids.shape[1]:
            more = np.full((len(self.stop_ids), stop_ids - self.stop_ids.shape[1]), _NO_TOKEN, np.int64)
            self.stop_ids = np.concatenate([self.stop_ids, more], 1)
        if rows > len(self.token):
            extra = max(rows, 2 * len(self.token), 16) - len(self.token)
            for name in self.__slots__:
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros((extra, *old.shape[1:]), old.dtype)]))

    def move(self, source: int, target: int) -> None:
        for name in self.__slots__:
            array = getattr(self, name)
            array[target] = array[source]

    def rules(self, rows: int) -> Rules:
        return Rules(self.temperature[:rows], self.top_k[:rows], self.top_p[:rows], self.min_p[:rows])

    def uniforms(self, rows: int) -> NDArray[np.float32]:
        """The random number of the token that each row will get."""
        return uniforms(self.stream[:rows], self.position[:rows] + 1)

    def record(
        self,
        rows: int,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        routes: NDArray[np.int16] | None = None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Append one token to each row; return which rows it stops, and which have reached their length.

        `routes` [rows, layers, top_k] are the experts of the tokens that were read for it.
        """
        widest = int(self.produced[:rows].max()) + 1
        if widest > self.tokens.shape[1]:
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)], 1)
            self.logprobs = np.concatenate([self.logprobs, np.zeros_like(self.logprobs)], 1)
            self.routes = np.concatenate([self.routes, np.zeros_like(self.routes)], 1)
        at = (np.arange(rows), self.produced[:rows])
        self.tokens[at] = tokens
        self.logprobs[at] = logprobs
        if routes is not None:
            self.routes[at] = routes
        self.token[:rows] = tokens
        self.position[:rows] += 1
        self.produced[:rows] += 1
        stopped = (self.stop_ids[:rows] == tokens[:, None]).any(1)
        return stopped, self.produced[:rows] >= self.allowed[:rows]

    def keep_routes(self, layers: int, top_k: int) -> None:
        """Make room for the experts of each token."""
        if self.routes.shape[2:] != (layers, top_k):
            self.routes = np.zeros((*self.tokens.shape, layers, top_k), np.int16)

    def collect_routes(self, row: int) -> NDArray[np.int16]:
        """The experts of the tokens that a row has read, [produced, layers, top_k]."""
        return self.routes[row, : int(self.produced[row])].copy()

    def collect(self, row: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs that a row has produced."""
        produced = int(self.produced[row])
        return self.tokens[row, :produced].tolist(), self.logprobs[row, :produced].tolist()
