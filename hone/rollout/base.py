"""The contract of a rollout engine: tokens in; tokens, log-probs and the weight version of each token out.

Two kinds of engine keep it. One in the trainer's process (the built-in engine) is given weights as a stream,
`update_weights`. One in a process of its own (vLLM, SGLang, the built-in engine as a server) is held by a
`ServerAdapter`; it is offered weights, `receive_weights`, and takes them from a channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from hone.rollout.adapters import AdapterFiles, AdapterKind
from hone.rollout.host import Host, LocalHost
from hone.rollout.settings import RolloutConfig
from hone.types import Completion, Image, Metrics, SamplingParams

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests that run when an engine pauses. `abort`: they end now with the tokens they have; `wait`:
`pause` returns when they are done; `keep`: they stand still until `resume`. New requests wait for `resume` in all."""


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """A replica's proof of what it serves after a weight sync: the digest of the weights it now holds."""

    replica: str
    version: int
    digest: str  # of (name, dtype, shape, bytes) of every weight as stored; see hone.models.digest
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Scored:
    """How likely an engine finds the tokens of a sequence, each given those before it, at temperature 1.

    All tuples have the length of the sequence; the first entry speaks of a token that nothing precedes: 0.0, and empty.
    """

    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()  # the most likely tokens of each place, most likely first, if asked for
    top_logprobs: tuple[tuple[float, ...], ...] = ()


class ReplicaLost(RuntimeError):
    """A replica's process died, or does not answer any more: its requests can be sent to another."""


class Generating(Protocol):
    """What every engine does. All coroutines run on one event loop."""

    @property
    def weight_version(self) -> int: ...

    async def generate(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Completion:
        """Continue `token_ids`, whose first placeholders are those of `images`.

        Raises ValueError for a request that cannot be served (too long, empty), ReplicaLost if the engine died on the
        way, RuntimeError if it fails or has no weights.
        """

    @property
    def has_base(self) -> bool:
        """Whether it holds whole weights that came by a sync, which an adapter can be put on."""

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why an adapter of this kind cannot be sent to it by itself; empty: it can."""

    async def sleep(self, level: int) -> None:
        """Give memory back. Level 1: drop the KV cache; level 2: the weights too (they must be sent again)."""

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None: ...

    async def abort_all(self) -> None:
        """End every running request now; each `generate` returns its partial tokens with `StopReason.ABORTED`."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens; see `PauseMode` for the requests that run."""

    async def resume(self) -> None: ...

    def metrics(self) -> Metrics:
        """Throughput and cache figures since the last call (`rollout/` names)."""


class RolloutEngine(Generating, Protocol):
    """One replica that generates in the trainer's process."""

    async def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightReceipt:
        """Replace every weight; KV and prefix caches of older versions are dropped before the next token."""

    async def update_adapter(
        self, stream: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], version: int
    ) -> WeightReceipt:
        """Serve the base weights with a LoRA adapter (PEFT's names and configuration), in place of the one before."""

    def expected_weights(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of every tensor that `update_weights` wants, tied heads included."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """All that a server adapter is constructed from: `ROLLOUT_ENGINES.get(backend)(spec)`.

    Constructing reads the settings and starts nothing; `start` does.
    """

    settings: RolloutConfig
    model: str  # folder of the Hugging Face model; its weights need not be read, a sync brings them
    dtype: str  # in which the server stores weights and computes, unless the engine's options say otherwise
    number: int  # of the replica, from 0
    logs: Path  # folder of server logs, which exists; `<logs>/<name>.log`
    token: str = field(repr=False)  # the run's; for the environment variable HONE_TOKEN of the server, nothing else
    tokenizer: str = ""  # folder or hub name; empty: the model's own
    trust_remote_code: bool = False
    frozen: bool = False  # it serves the weights in the model's folder from its start, and no sync brings others
    adapter: AdapterKind | None = None  # of the LoRA adapter that the policy is, sent beside its base; None: none
    adapters: Mapping[str, AdapterFiles] = field(default_factory=dict)  # others, served beside the policy by name
    devices: tuple[int, ...] = ()  # indices of the accelerators that this replica may use; empty: all that are seen
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables, from the platform
    routed_layers: tuple[int, ...] = ()  # layers whose experts completions have to tell of each token; empty: none
    host: Host = field(default_factory=LocalHost, repr=False)  # the machine that it runs on

    @property
    def name(self) -> str:
        return f"{self.settings.backend}-{self.number}"


class ServerAdapter(Generating, Protocol):
    """One replica in a process of its own, seen from the trainer's process.

    It is a `Replica` of `hone.weights` too (name, ranks, pause, receive_weights, resume, stop). Its coroutines raise
    ReplicaLost when the process died or its connection broke, so that the router can send the request elsewhere.
    """

    name: str

    @property
    def ranks(self) -> int:
        """Processes of it that receive weights (tensor parallel size)."""

    @property
    def positional_seed(self) -> bool:
        """Whether a token's random number depends on the request's seed and the token's position alone.

        Then a request that is sent again with its first tokens goes on as if it had never stopped. An engine whose
        random stream begins anew with each request gets another seed for the rest, drawn from the first.
        """

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype in which it stores weights: what it is sent is cast to it first."""

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""

    async def start(self) -> None:
        """Start the server and wait until it answers; again after it died. Raises ServerFailed with its last lines.

        A server that has just started serves nothing (version -1) before it received weights.
        """

    async def score(self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0) -> Scored:
        """How likely it finds the tokens of a sequence, and the `top_k` most likely ones at each place.

        Raises as `generate` does.
        """

    async def receive_weights(self, offer: Mapping[str, Any]) -> list[WeightReceipt]:
        """Let the server take in the weights that a sender offers; one receipt per worker of it."""

    async def stop(self, reason: str) -> None:
        """Serve nothing more (version -1) until whole weights were received: what it has is unknown or partly new."""

    async def close(self) -> None:
        """End the server with everything it started; again is fine."""


__all__ = [
    "Generating",
    "PauseMode",
    "ReplicaLost",
    "RolloutEngine",
    "Scored",
    "ServerAdapter",
    "ServerSpec",
    "WeightReceipt",
]
