"""What the host knows of each row of the running batch, as arrays: a step's bookkeeping is a few array operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone.rollout.requests import Request
from hone.rollout.sampling import Rules, stream_of, uniforms

_NO_TOKEN = -1


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
        """Append one token to each row; which rows are stopped by it, and which have reached their length.

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
