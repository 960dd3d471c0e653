"""A request on its way through the replicas: what it may still ask for, and the pieces of its answer so far.

request --piece--> replica: aborted, or died --rest (prompt + tokens so far)--> another replica --> one completion
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from hone.data.routes import Routes, joined_routes
from hone.schedule.replay import ReplayError
from hone.schedule.seats import fits
from hone.types import Completion, GenerationRequest, SamplingParams, StopReason


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request without its whole answer."""

    request: GenerationRequest
    cost: float = 0.0  # tokens that it is expected to compute at the replica that has it
    deaths: int = 0  # of replicas that it was running at
    is_poison: bool = False  # it made a replica die: it is not sent again
    sent: int = 0  # how often it was sent again
    tokens: list[int] = field(default_factory=list)  # of the answer; so are the next three
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def trajectory(self) -> str:
        """The request ids of one trajectory differ in their last part."""
        return self.request.id.rpartition("/")[0]

    def restrict(self) -> int | None:
        """In a replay, allow only the version that samples the next token.

        Returns how many tokens it samples; None: all that are left.
        """
        tokens = len(self.tokens)
        for version, count in self.request.spans[:-1]:
            if tokens < count:
                self._allow(version)
                return count - tokens
            tokens -= count
        if self.request.spans:
            self._allow(self.request.spans[-1][0])
        return None

    def _allow(self, version: int) -> None:
        if self.request.versions != (version, version):
            self.request = replace(self.request, versions=(version, version))

    def piece(self, engine: Any, most: int | None) -> GenerationRequest:
        """Make the request for the next piece: fewer tokens, `most` at most, under a name of its own.

        Its random stream is another one where the engine would begin the same one anew. Raises ReplayError for the rest
        of an answer that follows a JSON schema, of another version than its beginning.
        """
        if not self.sent and most is None:
            return self.request
        if self._is_indivisible and self.tokens:
            raise ReplayError(
                f"request {self.id!r} cannot be replayed: it wants an answer that follows a JSON schema, and in the "
                f"recorded run several weight versions sampled it ({self.request.spans}); an engine follows a schema "
                "from an answer's first token only"
            )
        name = f"{self.id}+{self.sent}" if self.sent else self.id  # a replica may still know the last one
        prompt = (*self.request.tokens, *self.tokens)
        return replace(self.request, id=name, tokens=prompt, sampling=self._sampling(engine, most))

    def _sampling(self, engine: Any, most: int | None) -> SamplingParams:
        sampling = self.request.sampling
        tokens = sampling.max_tokens - len(self.tokens)
        left = replace(sampling, max_tokens=tokens if most is None else min(tokens, most))
        if engine.positional_seed or not self.tokens:
            return left
        text = f"{sampling.seed}/{len(self.tokens)}".encode()
        return replace(left, seed=int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)

    @property
    def _is_indivisible(self) -> bool:
        """Return whether an aborted piece is dropped: engines follow a JSON schema from the first token only."""
        return bool(self.request.sampling.json_schema)

    def add(self, piece: Completion, replica: str) -> None:
        """Append a piece. Raises RuntimeError for tokens of weights that the request may not be sampled from."""
        for version in piece.weight_versions if self.request.versions else ():
            if not fits(version, self.request.versions):
                raise RuntimeError(
                    f"replica {replica} sampled request {self.id!r} from weight version {version}; it may be sampled "
                    f"from versions {self.request.versions}"
                )
        if self._is_indivisible and piece.stop_reason is StopReason.ABORTED:
            return
        self.tokens += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += piece.weight_versions
        self.routes = joined_routes(self.routes, piece.routed_experts)

    def cut(self, length: int) -> None:
        """Drop the tokens of the answer from this one on."""
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]

    def completion(self, reason: StopReason) -> Completion:
        """Join the pieces."""
        tokens, logprobs, versions = tuple(self.tokens), tuple(self.logprobs), tuple(self.versions)
        known = max(len(self.request.tokens) + len(tokens) - 1, 0)  # a cut leaves fewer than were computed
        routes = None if self.routes is None else self.routes[:known]
        return Completion(self.id, tokens, logprobs, versions, reason, routes)


__all__ = ["PendingRequest"]
