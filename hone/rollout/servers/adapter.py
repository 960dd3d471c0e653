"""Base of vLLM, of other engines and of the built-in one as servers: `RolloutServer`.

start, close            the process and its connection (`connection.ServerConnection`)
generate, score         checks, what is open and counted (`open_requests.OpenRequests`)
pause, resume, sleep    which of it is awake and may go on (`hone.rollout.admission.ReplicaState`)
receive_weights, stop   what it serves; a failed update is never served

An engine's own file translates these into requests that its server understands, and does nothing else.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from hone.config import count_as_read
from hone.data.routes import Routes, mixture_rows
from hone.models.source import check_source
from hone.rollout.adapters import AdapterKind
from hone.rollout.admission import CONSTRAINS_NOT, WAKE_TAGS, ReplicaState, RequestLimits
from hone.rollout.base import ReplicaLost, ScoreAborted, ServerSpec, WeightReceipt
from hone.rollout.images import PlacedImages
from hone.rollout.servers.connection import CONTROL_S, ServerConnection
from hone.rollout.servers.host import Site
from hone.rollout.servers.open_requests import OpenRequests
from hone.rollout.servers.shape import shape_of
from hone.types import Completion, GenerationRequest, Metrics, PauseMode, Scored, StopReason

STOP_S = 5.0  # what a server is given to confirm that it stopped, after it failed to take in weights
AGAIN_S = 0.02  # between two looks whether aborted requests have ended


class RolloutServer(ABC):
    """A `ServerAdapter` over HTTP. Constructing checks model and settings, `start` starts the server."""

    health: str  # a path that answers 200 when the server is ready
    takes_images = False  # whether a prompt may have images
    no_schema = CONSTRAINS_NOT  # why it cannot make an answer follow a JSON schema; empty: it can
    positional_seed: bool

    def __init__(self, spec: ServerSpec, config: PreTrainedConfig, dtype: torch.dtype, has_tokenizer: bool) -> None:
        """`config` is the model's (`model_config`); `dtype` is used for weights and computation."""
        count_as_read(spec.settings.builtin)
        self.name = spec.name
        self.ranks = shape_of(spec.settings).ranks
        self.dtype = dtype
        self.connection = ServerConnection(spec, self.health)
        self._spec = spec
        self._request_timeout_s = spec.settings.request_timeout_s
        self._limits = RequestLimits(config, math.inf, has_tokenizer, spec.adapters.keys(), self.name, self.no_schema)
        self._requests = OpenRequests(spec.name)
        self._reset()

    def _reset(self) -> None:
        """The state of a server that has just started."""
        self._updating = False
        self._state = ReplicaState(self.name)
        if self._spec.frozen:
            self._state.serve(0)
            self._state.has_base = False  # which came by no sync

    # ----------------------------------------------------------------------------------------- what an engine adds

    @abstractmethod
    def _launch(self, site: Site) -> tuple[list[str], dict[str, str]]:
        """Command and environment of the server, whose socket is in `site.folder`; no secret in the command."""

    @abstractmethod
    async def _longest_sequence(self) -> int:
        """Ask the running server how many tokens prompt and completion may have."""

    @abstractmethod
    async def _generate(self, request: GenerationRequest, images: PlacedImages) -> tuple[Completion, int, int]:
        """Send one checked request with its placed images: completion, tokens of the prompt, cached ones of these."""

    @abstractmethod
    async def _score(self, request_id: str, token_ids: Sequence[int], top_k: int) -> Scored | None:
        """Send one checked sequence, and read the log-prob of each of its tokens; None if it was aborted."""

    async def _computed(self) -> int | None:
        """Ask the server how many tokens it has computed since its start; None if it does not say."""
        return None

    @abstractmethod
    async def _abort_open(self) -> None:
        """Have the server end every request it has."""

    @abstractmethod
    async def _hold(self, mode: PauseMode) -> None:
        """Have the server produce no tokens; it may hold already."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Have the server produce tokens again; it may do so already."""

    @abstractmethod
    async def _receive(self, offer: dict[str, Any]) -> list[WeightReceipt]:
        """Have every rank take in the weights of `offer`, and drop older KV. Raises RuntimeError with ranks' errors."""

    @abstractmethod
    async def _give_back(self, level: int) -> None:
        """Have the server hold and give memory back: 1 the KV cache, 2 the weights too."""

    @abstractmethod
    async def _take_again(self, tags: list[str]) -> None:
        """Have the server take memory again for some of `WAKE_TAGS` that were given back."""

    @staticmethod
    @abstractmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why an adapter of this kind cannot be sent to it by itself; empty: it can."""

    @property
    @abstractmethod
    def _takes_adapters(self) -> bool:
        """Return whether it was started with room for adapters."""

    # ------------------------------------------------------------------------------------------- start and state

    @property
    def alive(self) -> bool:
        return self.connection.alive

    @property
    def has_base(self) -> bool:
        """Return whether it holds whole weights that came by a sync, which an adapter can be put on."""
        return self._state.has_base

    @property
    def weight_version(self) -> int:
        """The version that the next token will be sampled from; -1 while there is none."""
        return self._state.version

    @property
    def longest(self) -> float:
        """The most tokens of prompt and completion together; infinite before the server has started."""
        return self._limits.longest

    async def start(self) -> None:
        """Start the server and wait until it answers. Raises ServerFailed with the last lines of its log.

        It serves nothing (version -1) before it has received weights, except for a frozen model.
        """
        self._reset()
        await self.connection.start(self._launch, self._spec.settings.start_timeout_s)
        try:
            self._limits = replace(self._limits, longest=await self._longest_sequence())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the server with everything it started; again is fine."""
        self._state.close()
        await self.connection.close()

    async def beat(self) -> int | None:
        """See `ServerAdapter.beat`."""
        await self.connection.beat()
        return await self._computed() if self._state.can_generate else None

    # ---------------------------------------------------------------------------------------------- generating

    async def generate(self, request: GenerationRequest) -> Completion:
        """Continue the tokens of a request; log-probs are of the distribution that was sampled.

        Raises ValueError for a request that cannot be served; ReplicaLost if the server died; TimeoutError after
        `rollout.request_timeout_s`; RuntimeError if it sleeps, has no weights, or loses them meanwhile.
        """
        if request.images and not self.takes_images:
            raise ValueError(f"request {request.id!r} has images, and {self.name} takes text only")
        placed, _ = self._limits.check(request)
        check_routes(request, self._spec)
        self._state.check_serving()
        with self._requests.opened(request.id):
            completion, prompt_tokens, cached_tokens = await self._generate(request, placed)
        self._requests.count(completion, prompt_tokens, cached_tokens)
        if completion.stop_reason is StopReason.ABORTED:
            self._state.check_kept(request.id)
        return completion

    async def score(self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0) -> Scored:
        """Log-probs of tokens given the earlier ones, at temperature 1; raises as `generate` does, or ScoreAborted."""
        self._limits.check_prompt(request_id, tuple(token_ids))
        self._state.check_serving()
        with self._requests.opened(request_id):
            scored = await self._score(request_id, token_ids, top_k)
        if scored is None:
            self._state.check_kept(request_id)
            raise ScoreAborted(f"request {request_id!r} was aborted at {self.name}")
        found = [scored.logprobs, *([scored.top_ids, scored.top_logprobs] if top_k else [])]
        check_complete(f"request {request_id!r} at {self.name}", found, len(token_ids))
        return scored

    def metrics(self) -> Metrics:
        """Figures since the last call."""
        return self._requests.metrics()

    # ------------------------------------------------------------------------------------------ abort and pause

    async def abort_all(self) -> None:
        """End every request that is open now; each `generate` returns the tokens it has."""
        await self._abort(set(self._requests.ids))

    async def _abort(self, ids: set[str]) -> None:
        """Abort until all of `ids` have ended: the server does not see those that are still on their way."""
        async with asyncio.timeout(CONTROL_S):
            while ids & self._requests.ids:
                await self._abort_open()
                await asyncio.sleep(AGAIN_S)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens; running requests end now (`abort`), are let end (`wait`), or stand still (`keep`)."""
        running = set(self._requests.ids)
        self._state.paused = True
        await self._hold(mode)
        if mode == "abort":
            await self._abort(running)

    async def resume(self) -> None:
        """Produce tokens again; a server that sleeps does so when it is awake."""
        self._state.paused = False
        if self._state.is_awake:  # else it would compute with a KV cache that is not there
            await self._go_on()

    # ------------------------------------------------------------------------------------------------- weights

    async def receive_weights(self, offer: Mapping[str, Any]) -> list[WeightReceipt]:
        """Have every rank take in the weights of `offer`; running requests stand still meanwhile and go on with them.

        Every KV of older weights is dropped and computed anew before the next token. Raises RuntimeError if a rank
        did not take in everything: then requests fail, and nothing is served until whole weights were received.
        """
        version, is_adapter = int(offer["version"]), offer["payload"]["kind"] == "adapter"
        if is_adapter and not self._takes_adapters:
            raise RuntimeError(
                f"{self.name} was started without room for an adapter, which it has if the run trains or names one"
            )
        self._state.check_update(is_adapter)
        self._updating = True
        try:
            self._state.version = -1
            receipts = await self._receive(dict(offer))
        except BaseException as error:
            with suppress(ReplicaLost, TimeoutError):
                async with asyncio.timeout(STOP_S):  # one that hangs does not hold up the others
                    await self.stop(f"the update to weights version {version} did not complete: {error}")
            raise
        finally:
            self._updating = False
            if not self._state.paused and self.alive:
                await self.resume()
        self._state.serve(version)
        return receipts

    async def stop(self, reason: str) -> None:
        """Serve nothing more (version -1) until whole weights were received; requests that run fail.

        Raises TimeoutError for a server that does not answer: it hangs.
        """
        self._state.stop(reason)
        if self.alive:
            await self.abort_all()
            await self.connection.beat()

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def sleep(self, level: int) -> None:
        """Give memory back: 1 the KV cache, 2 the weights too. Running requests wait. On a CPU the memory is kept."""
        self._state.sleep(level, WAKE_TAGS)
        await self._give_back(level)

    async def wake_up(self, tags: tuple[str, ...] = WAKE_TAGS) -> None:
        """Take memory again for the parts named. After level 2, weights must be sent before anything is generated."""
        wanted = self._state.asleep(tags)
        if wanted:
            await self._take_again(wanted)
            self._state.wake(wanted)
        if wanted and self._state.is_awake:
            await (self._hold("keep") if self._state.paused else self._go_on())


def check_routes(request: GenerationRequest, spec: ServerSpec) -> None:
    """Raise ValueError for a request that asks for experts which the server does not return."""
    if request.sampling.routed_experts and not spec.routed_layers:
        raise ValueError(
            f"request {request.id!r} asks for the experts of its tokens, and {spec.name} was started without them"
        )


def check_complete(what: str, found: Sequence[Sequence[Any]], tokens: int) -> None:
    """Raise RuntimeError unless every list of scores has one entry per token."""
    if any(len(one) != tokens for one in found):
        raise RuntimeError(f"{what}: it scored {', '.join(str(len(one)) for one in found)} of {tokens} tokens")


def with_routes(completion: Completion, found: Routes | None, prompt: int, spec: ServerSpec) -> Completion:
    """The completion with the experts of all its tokens but the last; an aborted one may have none.

    `prompt` is the length of its prompt. Raises RuntimeError if the server did not return them.
    """
    if found is None and completion.stop_reason is StopReason.ABORTED:
        return completion
    try:
        rows = mixture_rows(found, spec.routed_layers, prompt + len(completion.token_ids) - 1)
    except ValueError as error:
        raise RuntimeError(f"request {completion.request_id!r} at {spec.name}: {error}") from error
    return replace(completion, routed_experts=rows)


def model_config(spec: ServerSpec) -> PreTrainedConfig:
    """The model's transformers configuration.

    Raises ModelError for a model or tokenizer that brings code of its own, unless that was allowed.
    """
    check_source(spec.model, "model.path", "config.json", spec.trust_remote_code, None)
    tokenizer = Path(spec.tokenizer or spec.model).expanduser()
    if (tokenizer / "tokenizer_config.json").is_file():
        check_source(str(tokenizer), "the tokenizer", "tokenizer_config.json", spec.trust_remote_code, None)
    found: PreTrainedConfig = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    return found


__all__ = ["AGAIN_S", "RolloutServer", "model_config", "with_routes"]
