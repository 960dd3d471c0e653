"""Requests: what was asked, what has come of it so far, and the checks that refuse what cannot be served."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hone.data.routes import Routes
from hone.rollout.shown import Shown
from hone.types import Completion, PromptTooLong, SamplingParams, StopReason

_MARGIN = 8  # tokens decoded before the ones that can hold the stop string, so that those decode as they do in place


class StopStrings:
    """Tells which token completes one of some strings."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Any) -> None:
        self._stop = stop
        self._tokenizer = tokenizer
        self._window = max(len(text.encode()) for text in stop) + _MARGIN  # a token holds at least one byte of text
        self._can_end: dict[int, bool] = {}

    def completed_by(self, tokens: list[int]) -> bool:
        """Whether the last token completes a stop string within the generated `tokens`."""
        if not self._may_end_with(tokens[-1]):
            return False
        text = self._decode(tokens[-self._window :])
        return any(stop in text for stop in self._stop)

    def _may_end_with(self, token: int) -> bool:
        """Whether a token's text has the last character of a stop string (or a part of a character): found once."""
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
    shown: Shown = ()  # the images of the prompt
    shift: int = 0  # how far positions after them are ahead of the place in the sequence
    row: int = -1  # in the running batch; -1: waiting
    tokens: list[int] = field(default_factory=list)  # generated in earlier stays in the batch; as are the next two
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None  # of the first tokens of the sequence, if they are asked for

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens) if self.tokens else self.prompt

    @property
    def room(self) -> int:
        """Columns of the KV cache that it can come to need."""
        return len(self.prompt) + self.limit

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def knows_for(self, other: Request) -> bool:
        """Whether this request shows what `other` shows, and notes of its prompt all that `other` wants of it."""
        noted = self.sampling.routed_experts or not other.sampling.routed_experts
        return noted and self.shown == other.shown

    @property
    def kept_routes(self) -> int:
        """How many tokens' experts are known."""
        return 0 if self.routes is None else len(self.routes)

    def route(self, start: int, routes: Routes) -> None:
        """Note the experts of tokens `start`, `start + 1` ...; what is known of the first of them stays."""
        if start > self.kept_routes:
            raise RuntimeError(f"request {self.request_id!r}: the experts of token {self.kept_routes} were not noted")
        new = routes[self.kept_routes - start :]
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


def check_prompt(request_id: str, token_ids: tuple[int, ...], vocabulary: int, longest: int) -> None:
    """Raises ValueError for a prompt that cannot be continued; PromptTooLong is the one that says so of its length."""
    if not token_ids:
        raise ValueError(f"request {request_id!r} has an empty prompt; at least one token is needed")
    if len(token_ids) >= longest:
        raise PromptTooLong(
            f"request {request_id!r} has a prompt of {len(token_ids)} tokens, which leaves no room in sequences of at "
            f"most {longest} (max_sequence_tokens)"
        )
    _check_ids(f"request {request_id!r}: token_ids", token_ids, vocabulary)


def check_sampling(request_id: str, sampling: SamplingParams, vocabulary: int, has_tokenizer: bool) -> None:
    """Raises ValueError for sampling values that mean nothing."""
    checks = (
        ("max_tokens", sampling.max_tokens, "at least 1", sampling.max_tokens >= 1),
        ("temperature", sampling.temperature, "finite and at least 0", 0 <= sampling.temperature < math.inf),
        ("top_k", sampling.top_k, "at least 0 (0: off)", sampling.top_k >= 0),
        ("top_p", sampling.top_p, "above 0 and at most 1", 0 < sampling.top_p <= 1),
        ("min_p", sampling.min_p, "between 0 and 1", 0 <= sampling.min_p <= 1),
        ("stop", sampling.stop, "strings that are not empty", all(sampling.stop)),
    )
    for name, value, expected, good in checks:
        if not good:
            raise ValueError(f"request {request_id!r}: {name} should be {expected}, found {value!r}")
    if sampling.stop and not has_tokenizer:
        raise ValueError(f"request {request_id!r} has stop strings, but the engine was given no tokenizer")
    _check_ids(f"request {request_id!r}: stop_token_ids", sampling.stop_token_ids, vocabulary)


def _check_ids(what: str, ids: Collection[int], vocabulary: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        bad = next(token for token in ids if not 0 <= token < vocabulary)
        raise ValueError(f"{what} should be within the vocabulary of {vocabulary}, found {bad}")
