"""Admission of requests: the state of a replica (`ReplicaState`), and limits of its model (`RequestLimits`).

Engines in this process and adapters of servers use the same two.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedConfig

from hone.rollout.adapters import check_adapter
from hone.rollout.base import ReplicaLost
from hone.rollout.images import PlacedImages, place_images
from hone.types import GenerationRequest, PromptTooLong, SamplingParams

WAKE_TAGS = ("weights", "kv_cache")
CONSTRAINS_NOT = "has no such constraint: use rollout.backend=vllm, or ask for JSON in the prompt"
CLOSED = "it was closed"


class ReplicaState:
    """Weight version, what is missing before the replica can generate, and which parts of its memory are there."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.version = -1  # that the next token is sampled from; -1: none
        self.obstacle = "it has no weights yet; send them with update_weights"  # empty: the weights can be used
        self.has_base = False  # whole weights, of whatever version, that came by a sync
        self.paused = False
        self._awake = set(WAKE_TAGS)

    @property
    def is_awake(self) -> bool:
        """Return whether weights and KV cache have their memory."""
        return self._awake == set(WAKE_TAGS)

    @property
    def can_generate(self) -> bool:
        return self.is_awake and not (self.paused or self.obstacle)

    def check_serving(self) -> None:
        """Raise RuntimeError if requests cannot be taken, ReplicaLost if it was closed; a paused replica takes them."""
        if asleep := sorted(set(WAKE_TAGS) - self._awake):
            raise RuntimeError(f"rollout replica {self.replica} is asleep ({', '.join(asleep)}); call wake_up first")
        if self.obstacle:
            kind = ReplicaLost if self.obstacle == CLOSED else RuntimeError  # a request may have got its seat before
            raise kind(f"rollout replica {self.replica} cannot generate: {self.obstacle}")

    def check_kept(self, request_id: str) -> None:
        """Raise RuntimeError if a request was aborted because the weights were lost: sending it again is of no use."""
        if self.obstacle:
            raise RuntimeError(
                f"request {request_id!r}: rollout replica {self.replica} lost its weights: {self.obstacle}"
            )

    def check_update(self, is_adapter: bool) -> None:
        """Raise RuntimeError if weights cannot be taken in now, before anything changes."""
        if "weights" not in self._awake:
            raise RuntimeError(f"rollout replica {self.replica} has no room for weights: wake_up(('weights',)) first")
        if is_adapter and not self.has_base:
            raise RuntimeError(f"{self.replica} has no base weights: whole weights come before an adapter")

    def serve(self, version: int) -> None:
        """The weights of this version are complete."""
        self.version, self.obstacle, self.has_base = version, "", True

    def lose(self, obstacle: str) -> None:
        """The weights are gone, unknown or partly new; `obstacle` is the reason that later requests are given."""
        self.version, self.obstacle, self.has_base = -1, obstacle, False

    def close(self) -> None:
        """The engine has ended."""
        self.lose(CLOSED)

    def stop(self, reason: str) -> None:
        """Serve nothing more until whole weights have come."""
        self.lose(f"it was stopped ({reason}); send whole weights with update_weights")

    def sleep(self, level: int, parts: Collection[str]) -> None:
        """Give back the memory of `parts`; after level 2 the weights are gone. Raises ValueError for other levels."""
        if level not in (1, 2):
            raise ValueError(f"sleep level should be 1 or 2, found {level}")
        self._awake -= set(parts)
        if level == 2:
            self.lose("its weights were given back by sleep(2); send them with update_weights")

    def asleep(self, tags: Collection[str]) -> list[str]:
        """Those of `tags` whose memory was given back. Raises ValueError for an unknown tag."""
        if unknown := set(tags) - set(WAKE_TAGS):
            raise ValueError(f"wake_up knows the tags {', '.join(WAKE_TAGS)}; found {', '.join(sorted(unknown))}")
        return [tag for tag in WAKE_TAGS if tag in tags and tag not in self._awake]

    def wake(self, tags: Collection[str]) -> None:
        """The memory of `tags` is there again."""
        self._awake |= set(tags)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the requests to one engine with one model."""

    config: PreTrainedConfig  # of the whole model, vision tower included
    longest: float  # tokens of prompt and completion together
    has_tokenizer: bool
    adapters: Collection[str] = ()  # names of the adapters besides the policy's own
    engine: str = "the built-in rollout engine"  # for errors
    no_schema: str = CONSTRAINS_NOT  # why it cannot make answers follow a JSON schema; empty: it can

    @cached_property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    def check(self, request: GenerationRequest) -> tuple[PlacedImages, int]:
        """The images of the prompt with their places, and how far positions after them are ahead of the column.

        Raises ValueError for a request that the engine cannot serve; PromptTooLong if only its length is the reason.
        """
        sampling = request.sampling
        self.check_prompt(request.id, request.tokens)
        check_sampling(request.id, sampling, self.vocabulary, self.has_tokenizer)
        if sampling.json_schema and self.no_schema:
            raise ValueError(
                f"request {request.id!r} wants an answer that follows a JSON schema, and {self.engine} {self.no_schema}"
            )
        if sampling.adapter:
            check_adapter(sampling.adapter, self.adapters)
        return place_images(request.id, request.tokens, request.images, self.config) if request.images else ((), 0)

    def check_prompt(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Raises ValueError for token ids that no model call can take."""
        check_prompt(request_id, token_ids, self.vocabulary, self.longest)


def check_prompt(request_id: str, token_ids: tuple[int, ...], vocabulary: int, longest: float) -> None:
    """Raises ValueError for a prompt that cannot be continued; PromptTooLong if only its length is the reason."""
    if not token_ids:
        raise ValueError(f"request {request_id!r} has an empty prompt; at least one token is needed")
    if len(token_ids) >= longest:
        raise PromptTooLong(
            f"request {request_id!r} has a prompt of {len(token_ids)} tokens, which leaves no room in sequences of at "
            f"most {longest} (max_sequence_tokens)"
        )
    _check_ids(f"request {request_id!r}: token_ids", token_ids, vocabulary)


def check_sampling(request_id: str, sampling: SamplingParams, vocabulary: int, has_tokenizer: bool) -> None:
    """Raises ValueError for sampling values out of range, naming the value and the range."""
    checks = (
        ("max_tokens", sampling.max_tokens, "at least 1", sampling.max_tokens >= 1),
        ("temperature", sampling.temperature, "finite and at least 0", 0 <= sampling.temperature < math.inf),
        ("top_k", sampling.top_k, "at least 0 (0: off) and below 2^31", 0 <= sampling.top_k < 1 << 31),
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


__all__ = ["CONSTRAINS_NOT", "WAKE_TAGS", "ReplicaState", "RequestLimits", "check_prompt"]
