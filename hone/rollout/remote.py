"""The built-in engine in a process of its own, seen from the trainer's: `rollout.builtin.process: separate`.

    RemoteBuiltin (here) --HTTP over its private socket, JSON, the run's token--> hone/workers/serve.py: BuiltinEngine
          `-- Process: starts it, watches it, ends it

Every reply carries the weight version and what the engine has counted since its last one, so `weight_version` and
`metrics` need no request. The protocol is written down in `hone/workers/serve.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import aiohttp
import torch

from hone.config import ConfigError, count_as_read, plain
from hone.data.routes import routes_of_text
from hone.rollout.adapters import AdapterKind, unfit_for_merging
from hone.rollout.base import PauseMode, ReplicaLost, ServerSpec, WeightReceipt
from hone.rollout.host import SOCKET, Site
from hone.rollout.server import SILENT_S, Process
from hone.types import (
    Completion,
    Image,
    Metric,
    Metrics,
    PromptTooLong,
    Reducer,
    SamplingParams,
    StopReason,
    merge_metrics,
)

CONTROL_S = 60.0  # deadline of a control request, which has nothing to wait for
COUNTED = ("rollout/tokens", "rollout/prefill_tokens", "rollout/requests", "rollout/aborted")  # reported even if 0
ERRORS: Mapping[str, type[Exception]] = {
    "PromptTooLong": PromptTooLong,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
}


class RemoteBuiltin:
    """A `ServerAdapter`; constructing reads the settings, `start` starts the process."""

    positional_seed = True
    ranks = 1
    program: ClassVar[tuple[str, ...]] = ("-m", "hone.workers.serve")

    def __init__(self, spec: ServerSpec) -> None:
        settings = spec.settings
        count_as_read(settings.builtin)  # the process reads them
        if settings.tensor_parallel != 1:
            raise ConfigError(
                f"rollout.tensor_parallel = {settings.tensor_parallel}: the built-in engine uses one device per "
                "server; set 1, and rollout.replicas for more of them"
            )
        self.name = spec.name
        self._spec = spec
        self._start_timeout_s = settings.start_timeout_s
        self._request_timeout_s = settings.request_timeout_s
        own = settings.builtin.dtype
        self._dtype: torch.dtype = getattr(torch, spec.dtype if own == "auto" else own)
        self._server: Process | None = None
        self._site: Site | None = None
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # whose the session is
        self._version, self._has_base = -1, False
        self._metrics: Metrics = {}

    def _command(self, site: Site) -> list[str]:
        spec = self._spec
        told = {
            "model": spec.model,
            "tokenizer": spec.tokenizer,
            "trust_remote_code": spec.trust_remote_code,
            "dtype": spec.dtype,
            "settings": plain(spec.settings.builtin),
            "replica": self.name,
            "adapters": {name: str(files.folder) for name, files in spec.adapters.items()},
            "socket": str(site.folder / SOCKET),
            "threads": torch.get_num_threads(),
        }
        return [spec.settings.python or site.python, *self.program, json.dumps(told)]

    def _environment(self, site: Site) -> dict[str, str]:
        paths = [str(site.folder / "path"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        return {**self._spec.environment, "HONE_TOKEN": self._spec.token, "PYTHONPATH": path}

    # --------------------------------------------------------------------------------------------- its process

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def alive(self) -> bool:
        return self._server is not None and self._server.alive

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def has_base(self) -> bool:
        return self._has_base

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why it cannot take an adapter of this kind; empty: it can."""
        return unfit_for_merging(kind)

    async def start(self) -> None:
        """Start the process; it serves nothing (version -1) before it received weights. Raises ServerFailed."""
        self._version, self._has_base = -1, False
        self._server = None
        host, log = self._spec.host, self._spec.logs / f"{self.name}.log"
        try:
            self._site = site = await host.open()
            self._server = host.process(self.name, self._command(site), self._environment(site), log)
            await self._server.start(self._answers, self._start_timeout_s)
        except BaseException:
            await self.close()
            raise

    async def _answers(self) -> bool:
        try:
            await self._control("look")
        except ReplicaLost as error:  # it does not listen yet
            raise ConnectionError(str(error)) from error
        return True

    async def close(self) -> None:
        """End the process."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        self._version, self._has_base = -1, False
        try:
            if self._server is not None:
                await self._server.stop()
        finally:
            if self._site is not None:
                self._site = None
                await self._spec.host.close()

    # ---------------------------------------------------------------------------------------------- its verbs

    async def generate(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Completion:
        """Continue `token_ids`, within `rollout.request_timeout_s`. A caller that is cancelled frees its slot there."""
        if images:
            raise ValueError(f"request {request_id!r} shows images, and {self.name} serves text only")
        asked = {"request_id": request_id, "token_ids": list(token_ids), "sampling": asdict(sampling)}
        found = await self._request("generate", asked, self._request_timeout_s)
        return Completion(
            request_id=request_id,
            token_ids=tuple(found["token_ids"]),
            logprobs=tuple(found["logprobs"]),
            weight_versions=tuple(found["weight_versions"]),
            stop_reason=StopReason(found["stop_reason"]),
            routed_experts=routes_of_text(found["routed_experts"]),
        )

    async def receive_weights(self, offer: Mapping[str, Any]) -> list[WeightReceipt]:
        """Let it take in what a sender offers. Raises ValueError for tensors that do not fit the model."""
        found = await self._request("receive_weights", {"offer": dict(offer)}, float(offer["timeout_s"]) + CONTROL_S)
        return [WeightReceipt(**receipt) for receipt in found["receipts"]]

    async def stop(self, reason: str) -> None:
        await self._control("stop", reason=reason)

    async def abort_all(self) -> None:
        await self._control("abort_all")

    async def pause(self, mode: PauseMode = "keep") -> None:
        deadline = self._request_timeout_s if mode == "wait" else CONTROL_S
        await self._request("pause", {"mode": mode}, deadline)

    async def resume(self) -> None:
        await self._control("resume")

    async def sleep(self, level: int) -> None:
        await self._control("sleep", level=level)

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        await self._control("wake_up", tags=list(tags))

    async def look(self) -> None:
        """Ask for version and figures now; every other request brings them too."""
        await self._control("look")

    def metrics(self) -> Metrics:
        """What its replies have told since the last call."""
        found = merge_metrics({name: Metric.sum(0) for name in COUNTED}, self._metrics)
        self._metrics = {}
        return found

    # ------------------------------------------------------------------------------------------------ requests

    async def _control(self, verb: str, **body: Any) -> None:
        await self._request(verb, body, CONTROL_S)

    async def _request(self, verb: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request and its reply. Raises the server's ValueError or RuntimeError, ReplicaLost, or RuntimeError if
        the reply is late."""
        server = self._server
        try:
            url = f"http://server/{verb}"
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._open_session().post(url, json=body, timeout=timeout) as reply:
                found: dict[str, Any] = await reply.json()
                status = reply.status
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            if isinstance(error, TimeoutError):
                message = f"replica {self.name} did not answer {verb} within {timeout_s:g} s"
                if self._spec.host.machine and server is not None and await server.ends_within(SILENT_S):
                    raise ReplicaLost(f"{message}: {server.ended}") from error
                raise RuntimeError(message) from error
            ended = self._server.ended if self._server is not None else ""
            raise ReplicaLost(f"replica {self.name} was lost during {verb}: {ended or repr(error)}") from error
        if status != 200:
            raise ERRORS.get(found.get("kind", ""), RuntimeError)(str(found.get("error", found)))
        self._version, self._has_base = int(found["weight_version"]), bool(found["has_base"])
        told = {name: Metric(total, count, Reducer(kind)) for name, (total, count, kind) in found["metrics"].items()}
        self._metrics = merge_metrics(self._metrics, told)
        return found

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            if self._site is None:
                raise ReplicaLost(f"replica {self.name} does not run")
            self._loop = loop
            headers = {"Authorization": f"Bearer {self._spec.token}"}
            # an idle connection is given up before the server does so: a reused one would look like a lost replica
            connector = self._spec.host.connector(limit=0, keepalive_timeout=2.0)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._session


__all__ = ["RemoteBuiltin"]
