"""The contract of a rollout engine: tokens in; tokens, log-probs and the weight version of each token out.

There are two kinds of engine. A `RolloutEngine` runs in the trainer's process (the built-in engine) and gets weights as
a stream (`update_weights`). A `ServerAdapter` stands for a server in another process (vLLM, or the built-in engine as a
server), which receives weights over a transport (`receive_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hone.rollout.adapters import AdapterFiles, AdapterKind
from hone.rollout.servers.host import Host, LocalHost
from hone.rollout.settings import RolloutConfig
from hone.types import Completion, GenerationRequest, Metrics, PauseMode, Scored


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The tensors that an engine in this process serves after an update; the weight sync digests them."""

    replica: str
    version: int
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """A server's proof of what it serves after a weight sync: the digest of the weights it now holds."""

    replica: str
    version: int
    digest: str  # of (name, dtype, shape, bytes) of every weight as stored; see hone.weights.digests.digest
    tensors: int
    bytes: int


class ReplicaLost(RuntimeError):
    """A replica's process died or its connection broke: its requests can be sent to another replica."""


class ScoreAborted(RuntimeError):
    """A replica aborted the scoring of a sequence: it can be asked again."""


class Generating(Protocol):
    """The verbs of every engine. All coroutines run on one event loop."""

    @property
    def weight_version(self) -> int: ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Continue the tokens of a request from the weights that it serves.

        Raises ValueError for a request that cannot be served (too long, empty), ReplicaLost if the engine died on the
        way, RuntimeError if it fails or has no weights. A server need not know `sampling.prompt_logprobs`: the router
        calls `score` for it.
        """

    async def score(self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0) -> Scored:
        """Log-probs of the tokens of a sequence, and the `top_k` most likely tokens at each place.

        Raises as `generate` does, and ScoreAborted where `generate` returns an aborted completion.
        """

    @property
    def has_base(self) -> bool:
        """Return whether it holds whole weights that came by a sync, which an adapter can be put on."""

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

    async def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadedWeights:
        """Replace every weight; KV and prefix caches of older versions are dropped before the next token."""

    async def update_adapter(
        self, stream: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], version: int
    ) -> LoadedWeights:
        """Serve the base weights with a LoRA adapter (PEFT's names and configuration), in place of the one before."""

    def expected_weights(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of every tensor that `update_weights` wants, tied heads included."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Everything a server adapter is constructed from: `ROLLOUT_ENGINES.get(backend)(spec)`.

    The constructor reads the settings; `start` starts the server.
    """

    settings: RolloutConfig
    model: str  # folder of the Hugging Face model; its weights need not be read, a sync brings them
    dtype: str  # in which the server stores weights and computes, unless the engine's options say otherwise
    number: int  # of the replica, from 0
    logs: Path  # folder of server logs, which exists; `<logs>/<name>.log`
    token: str = field(repr=False)  # the run's; for the environment variable HONE_TOKEN of the server, nothing else
    tokenizer: str = ""  # folder or hub name; empty: the model's own
    trust_remote_code: bool = False
    context: int | None = None  # `model.use.context`; servers of other projects find theirs in the engine's options
    frozen: bool = False  # it serves the weights of the model's folder; there is no weight sync
    keep_cache: bool = False  # running requests go on with the KV of older weights after an update
    adapter: AdapterKind | None = None  # of the policy's LoRA adapter, sent without its base; None: it has none
    adapters: Mapping[str, AdapterFiles] = field(default_factory=dict)  # more adapters, by name; requests name one
    devices: tuple[int, ...] = ()  # indices of the accelerators that this replica may use; empty: all that are seen
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables, from the platform
    nodes: int = 1  # machines that run servers of this kind
    routed_layers: tuple[int, ...] = ()  # layers whose experts are returned for each token; empty: none
    host: Host = field(default_factory=LocalHost, repr=False)  # the machine that it runs on

    @property
    def name(self) -> str:
        at = f"@{self.host.address}" if self.host.address else ""
        return f"{self.settings.backend}-{self.number}{at}"


class ServerAdapter(Generating, Protocol):
    """One replica in a process of its own, as the trainer's process uses it.

    It is also a `Replica` of `hone.weights` (name, ranks, pause, receive_weights, resume, stop). Its coroutines raise
    ReplicaLost when the process died or its connection broke, so that the router can send the request elsewhere.
    """

    name: str

    @property
    def ranks(self) -> int:
        """Number of its processes that receive weights (tensor parallel size)."""

    @property
    def positional_seed(self) -> bool:
        """Return whether a token's random number depends on the request's seed and the token's position alone.

        If so, a request that is resent with its first tokens continues as if it had never stopped. Otherwise the
        engine's random stream restarts with each request, and the router derives another seed for the rest.
        """

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype in which it stores weights; weights are cast to it before they are sent."""

    @property
    def alive(self) -> bool:
        """Return whether the server's process runs."""

    async def start(self) -> None:
        """Start the server and wait until it answers; again after it died. Raises ServerFailed with its last lines.

        A server that has just started serves nothing (version -1) before it received weights.
        """

    async def beat(self) -> int | None:
        """Wait for a sign of life; returns the tokens computed so far, None if unknown or while none may be computed.

        Raises ReplicaLost, TimeoutError or RuntimeError without one, OutOfDescriptors if this process cannot ask.
        """

    async def receive_weights(self, offer: Mapping[str, Any]) -> list[WeightReceipt]:
        """Have the server receive the weights of an offer; returns one receipt per worker."""

    async def stop(self, reason: str) -> None:
        """Serve nothing more (version -1) until whole weights were received: its weights are unknown or mixed."""

    async def close(self) -> None:
        """End the server with everything it started; again is fine."""


__all__ = [
    "Generating",
    "LoadedWeights",
    "ReplicaLost",
    "RolloutEngine",
    "ScoreAborted",
    "ServerAdapter",
    "ServerSpec",
    "WeightReceipt",
]
