"""The rollout `tinker`: samples from the service's sampler that a weight sync names.

    weight sync --name of a sampler, a sequence with the trainer's log-probs--> check --> generate, score

The check: the new sampler and the one before score the sequence. If the trainer's log-probs moved and the new sampler
still answers as the one before, it serves old weights, and the run ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hone.rollout.adapters import AdapterKind
from hone.rollout.base import LoadedWeights
from hone.rollout.settings import BuiltinSettings
from hone.types import (
    Completion,
    GenerationRequest,
    Metric,
    Metrics,
    PauseMode,
    SamplingParams,
    Scored,
    StopReason,
    Versions,
)
from hone.weights.base import WeightSyncError
from hone_tinker.connection import Connection, Usage, connected
from hone_tinker.engine import PROBE_LOGPROBS, PROBE_TOKENS, SNAPSHOT
from hone_tinker.messages import Answer, read_answer, sampling_request

MOVED = 1e-3  # mean change of log-probs by an update from which on a sampler can be told from the one before
PAUSED_S, LOOK_S = 600.0, 0.05  # longest pause, and the time between two looks at it
SAME = 0.1  # of that change: a sampler that is nearer than this to the one before is the one before


class ServiceRollout:
    """See `hone.rollout.base.RolloutEngine`. It knows its service from the first weight sync."""

    in_process = only_inside = True
    answers_while_training = True  # the service computes, and each version has a sampler of its own
    has_base = False

    def __init__(self, settings: BuiltinSettings, config: Any, tokenizer: Any, device: str, name: str) -> None:
        self._name = name
        self._service: Connection | None = None
        self._sessions: dict[int, str] = {}  # version -> session: open draws may need earlier ones
        self._numbers = itertools.count()  # of requests, to all samplers: the same number again is the same request
        self._version = -1
        self._open: set[asyncio.Future[Any]] = set()
        self._paused = False
        self._prices: list[float] | None = None
        self._said = Usage()  # what `metrics` has reported
        self._checked: Metrics = {}

    @property
    def weight_version(self) -> int:
        return self._version

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        return "the service holds base and adapter, and a sync sends the name of a sampler"

    def expected_weights(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {SNAPSHOT: (torch.float32, (0,))}

    # ------------------------------------------------------------------------------------------------- weights

    async def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> LoadedWeights:
        """Sample from the sampler that the stream names. Raises WeightSyncError if it answers like the one before."""
        tensors = {name: tensor.clone() for name, tensor in stream}
        told = json.loads(bytes(int(code) for code in tensors[SNAPSHOT]))
        self._service, self._prices = connected(told["url"]), told["prices"]
        before = self._sessions.get(self._version)
        if before is not None and PROBE_TOKENS in tensors:
            sessions = told["session"], before
            await self._check(tensors[PROBE_TOKENS].tolist(), tensors[PROBE_LOGPROBS], sessions, version)
        older = {one: session for one, session in self._sessions.items() if one < version}
        self._sessions, self._version = {**older, version: told["session"]}, version
        return LoadedWeights(self._name, version, tensors)

    async def _check(self, tokens: list[int], trained: Tensor, sessions: tuple[str, str], version: int) -> None:
        """Compare the new sampler and the one before with the trainer."""
        new, old = await asyncio.gather(*(self._probed(tokens, session) for session in sessions))
        moved, gap = float((old - trained).abs().mean()), float((new - trained).abs().mean())
        self._checked = {"weights/remote_gap": Metric.mean(gap), "weights/remote_moved": Metric.mean(moved)}
        if moved > MOVED and float((new - old).abs().mean()) < SAME * moved:
            raise WeightSyncError(
                f"the service's new sampler {sessions[0]} answers like the one before: version {version} changed the "
                f"trainer's log-probs of a sequence by {moved:.3g} per token, and the sampler's by "
                f"{float((new - old).abs().mean()):.3g}. It serves old weights; runtime.backend.check_snapshot=false "
                "trains on"
            )

    async def _probed(self, tokens: list[int], session: str) -> Tensor:
        answer = await self._ask(
            tokens, {"max_tokens": 1, "seed": 0, "temperature": 1.0}, session, prompt_logprobs=True
        )
        assert answer.prompt_logprobs is not None
        return answer.prompt_logprobs[1:]

    async def update_adapter(
        self, stream: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], version: int
    ) -> LoadedWeights:
        raise ValueError("a sync to a service sends the name of a sampler, never an adapter")

    # ------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> Completion:
        """See `Generating`. Raises ValueError for what the protocol has no place for, ServiceFailed."""
        await self._resumed()
        sampling = request.sampling
        version = self._fitting(request.versions)
        if sampling.max_tokens == 0:
            scored = await self._scored_by(request.tokens, sampling.prompt_logprobs or 0, version)
            return Completion(request.id, (), (), (), StopReason.LENGTH, prompt_scores=scored)
        more: dict[str, Any] = {}
        if sampling.prompt_logprobs is not None:
            more = {"prompt_logprobs": True, "topk_prompt_logprobs": sampling.prompt_logprobs}
        asked = asyncio.ensure_future(self._ask(request.tokens, _params(request), self._sessions[version], **more))
        self._open.add(asked)
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            if not asked.cancelled():  # the caller was cancelled, not the request
                asked.cancel()
                raise
            return Completion(request.id, (), (), (), StopReason.ABORTED)
        finally:
            self._open.discard(asked)
        return Completion(
            request.id,
            answer.tokens,
            answer.logprobs,
            (version,) * len(answer.tokens),
            StopReason.STOP if answer.stopped else StopReason.LENGTH,
            prompt_scores=_scored(answer) if more else None,
        )

    async def score(self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0) -> Scored:
        return await self._scored_by(token_ids, top_k, self._fitting(None))

    async def _scored_by(self, token_ids: tuple[int, ...], top_k: int, version: int) -> Scored:
        params = {"max_tokens": 1, "seed": 0, "temperature": 1.0}
        more = {"prompt_logprobs": True, "topk_prompt_logprobs": top_k}
        return _scored(await self._ask(token_ids, params, self._sessions[version], **more))

    def _fitting(self, versions: Versions | None) -> int:
        """The newest version with a sampler of those that may answer; None: the newest of all."""
        fitting = [one for one in self._sessions if versions is None or versions[0] <= one <= versions[1]]
        if not fitting:
            wanted = "any" if versions is None else f"{versions[0]} to {versions[1]}"
            raise RuntimeError(f"no sampler has weights of version {wanted}; synced: {sorted(self._sessions)}")
        return max(fitting)

    async def _ask(self, tokens: Iterable[int], params: Mapping[str, Any], session: str, **more: Any) -> Answer:
        assert self._service is not None  # `update_weights` named the session
        service, numbered = self._service, {"sampling_session_id": session, "seq_id": next(self._numbers)}
        body = sampling_request(tokens, params, **numbered, **more)

        async def answered() -> Answer:
            answer = read_answer(await service.result("asample", body))
            service.usage.prefilled += len(body["prompt"]["chunks"][0]["tokens"])  # on the connection's thread: the
            service.usage.sampled += len(answer.tokens)  # trainer's thread may have the base score at the same time
            return answer

        return await asyncio.wrap_future(service.start(answered()))

    async def sleep(self, level: int) -> None:
        """Does nothing: no memory of this machine is used."""

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Does nothing."""

    async def abort_all(self) -> None:
        for one in tuple(self._open):
            one.cancel()

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._paused = True
        if mode == "abort":
            await self.abort_all()
        elif mode == "wait" and self._open:
            await asyncio.wait(self._open)

    async def resume(self) -> None:
        self._paused = False

    async def _resumed(self) -> None:
        """Wait while the rollout is paused. Raises TimeoutError if nobody resumes it."""
        deadline = time.monotonic() + PAUSED_S
        while self._paused:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._name} was paused for {PAUSED_S:g} s, and nobody resumed it")
            await asyncio.sleep(LOOK_S)

    def metrics(self) -> Metrics:
        """Tokens that the service has computed since the last call, and their cost; the last check of a sampler."""
        checked, self._checked = self._checked, {}
        if self._service is None:
            return checked
        now, said = self._service.usage, self._said
        counts = [now.prefilled - said.prefilled, now.sampled - said.sampled, now.trained - said.trained]
        self._said = Usage(now.prefilled, now.sampled, now.trained)
        names = ("perf/remote_prefilled_tokens", "perf/remote_sampled_tokens", "perf/remote_trained_tokens")
        found = {name: Metric.sum(float(count)) for name, count in zip(names, counts, strict=True)}
        if self._prices is not None:
            cost = sum(count * price for count, price in zip(counts, self._prices, strict=True)) / 1e6
            found["perf/remote_cost"] = Metric.sum(cost)
        return checked | found


def _params(request: GenerationRequest) -> dict[str, Any]:
    """`sampling_params` of a request. Raises ValueError for what the protocol has no place for."""
    sampling: SamplingParams = request.sampling
    refused = {
        "min_p": sampling.min_p > 0,
        "json_schema": bool(sampling.json_schema),
        "adapter": bool(sampling.adapter),
        "routed_experts": sampling.routed_experts,
        "images": bool(request.images),
        "stop strings together with stop_token_ids": bool(sampling.stop and sampling.stop_token_ids),
        "ignore_eos with stops": sampling.ignore_eos and bool(sampling.stop or sampling.stop_token_ids),
    }
    for name, is_so in refused.items():
        if is_so:
            raise ValueError(f"request {request.id!r} has {name}, which requests to a service cannot have")
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
    }
    if sampling.ignore_eos:
        params["stop"] = []
    elif sampling.stop or sampling.stop_token_ids:
        params["stop"] = list(sampling.stop or sampling.stop_token_ids)
    return params


def _scored(answer: Answer) -> Scored:
    assert answer.prompt_logprobs is not None
    logprobs = (0.0, *answer.prompt_logprobs[1:].tolist())
    if answer.prompt_top is None:
        return Scored(logprobs)
    ids, tops = answer.prompt_top
    return Scored(logprobs, ((), *map(tuple, ids[1:].tolist())), ((), *map(tuple, tops[1:].tolist())))
