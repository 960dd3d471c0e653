"""The built-in engine in a process of its own, seen from the trainer's: `rollout.builtin.process: separate`.

    BuiltinServer --HTTP over a unix socket, JSON, the run's token--> hone/workers/inside/builtin.py: BuiltinEngine

The protocol is written down in `hone/workers/inside/builtin.py`. Every reply has what the engine has counted since its
last one, so `metrics` needs no request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from hone.config import ConfigError, plain
from hone.data.routes import routes_of_text
from hone.plugins import environment as plugin_environment
from hone.rollout.adapters import AdapterKind, unfit_for_merging
from hone.rollout.base import ServerSpec, WeightReceipt
from hone.rollout.images import PlacedImages
from hone.rollout.servers.adapter import RolloutServer, model_config
from hone.rollout.servers.connection import CONTROL_S
from hone.rollout.servers.host import SOCKET, Site
from hone.types import (
    Completion,
    GenerationRequest,
    Metric,
    Metrics,
    PauseMode,
    Reducer,
    Scored,
    StopReason,
    merge_metrics,
)

ALWAYS = ("rollout/tokens", "rollout/prefill_tokens", "rollout/requests", "rollout/aborted")  # reported even if 0

# While the garbage collector is on, it looks at everything thirty times during the imports: 3.2 s instead of 2.4.
BOOT = "import gc, runpy, sys; gc.disable(); del sys.argv[0]; runpy.run_module(sys.argv[0], None, '__main__', True)"


class BuiltinServer(RolloutServer):
    """The built-in engine with hone's own interpreter."""

    positional_seed = True
    keeps_cache = True
    health = "/health"
    program: ClassVar[tuple[str, ...]] = ("-c", BOOT, "hone.workers.inside.builtin")

    def __init__(self, spec: ServerSpec) -> None:
        if spec.settings.tensor_parallel != 1:
            raise ConfigError(
                f"rollout.tensor_parallel = {spec.settings.tensor_parallel}: the built-in engine uses one device per "
                "server; set 1, and rollout.replicas for more of them"
            )
        if spec.frozen:
            raise ConfigError(
                "rollout.builtin.process: separate needs a weight sync, and this model is never trained; set inside"
            )
        chosen = spec.settings.builtin.dtype
        dtype: torch.dtype = getattr(torch, spec.dtype if chosen == "auto" else chosen)
        super().__init__(spec, model_config(spec), dtype, has_tokenizer=True)
        self._metrics: Metrics = {}

    def _launch(self, site: Site) -> tuple[list[str], dict[str, str]]:
        spec = self._spec
        arguments = {
            "model": spec.model,
            "tokenizer": spec.tokenizer,
            "trust_remote_code": spec.trust_remote_code,
            "context": spec.context,
            "dtype": spec.dtype,
            "settings": plain(spec.settings.builtin),
            "replica": self.name,
            "adapters": {name: str(files.folder) for name, files in spec.adapters.items()},
            "keep_cache": spec.keep_cache,
            "socket": str(site.folder / SOCKET),
            "threads": torch.get_num_threads(),
        }
        path = os.pathsep.join(filter(None, [str(site.folder / "path"), os.environ.get("PYTHONPATH", "")]))
        environment = {**plugin_environment(), **spec.environment, "HONE_TOKEN": spec.token, "PYTHONPATH": path}
        return [spec.settings.python or site.python, *self.program, json.dumps(arguments)], environment

    async def _longest_sequence(self) -> int:
        return int((await self._call("look"))["longest"])

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why it cannot take an adapter of this kind; empty: it can."""
        return unfit_for_merging(kind)

    @property
    def _takes_adapters(self) -> bool:
        return True

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(self, request: GenerationRequest, images: PlacedImages) -> tuple[Completion, int, int]:
        body = {"request_id": request.id, "token_ids": list(request.tokens), "sampling": asdict(request.sampling)}
        found = await self._call("generate", body, self._request_timeout_s)
        completion = Completion(
            request_id=request.id,
            token_ids=tuple(found["token_ids"]),
            logprobs=tuple(found["logprobs"]),
            weight_versions=tuple(found["weight_versions"]),
            stop_reason=StopReason(found["stop_reason"]),
            routed_experts=routes_of_text(found["routed_experts"]),
        )
        return completion, len(request.tokens), 0

    async def _score(self, request_id: str, token_ids: Sequence[int], top_k: int) -> Scored:
        body = {"request_id": request_id, "token_ids": list(token_ids), "top_k": top_k}
        found = await self._call("score", body, self._request_timeout_s)
        ids, likely = (tuple(map(tuple, found[key])) for key in ("top_ids", "top_logprobs"))
        return Scored(tuple(found["logprobs"]), ids, likely)

    async def _abort_open(self) -> None:
        await self._call("abort_all")

    async def _hold(self, mode: PauseMode) -> None:
        deadline = self._request_timeout_s if mode == "wait" else CONTROL_S
        await self._call("pause", {"mode": mode}, deadline)

    async def _go_on(self) -> None:
        await self._call("resume")

    # ------------------------------------------------------------------------------------- weights, sleep and wake

    async def _receive(self, offer: dict[str, Any]) -> list[WeightReceipt]:
        found = await self._call("receive_weights", {"offer": offer}, float(offer["timeout_s"]) + CONTROL_S)
        return [WeightReceipt(**{**receipt, "replica": self.name}) for receipt in found["receipts"]]

    async def _give_back(self, level: int) -> None:
        await self._call("sleep", {"level": level})

    async def _take_again(self, tags: list[str]) -> None:
        await self._call("wake_up", {"tags": tags})

    # ------------------------------------------------------------------------------------------------- metrics

    async def look(self) -> None:
        """Fetch the engine's figures now; every other request brings them too."""
        await self._call("look")

    def metrics(self) -> Metrics:
        """The engine's own figures, as far as its replies have brought them, since the last call."""
        found = merge_metrics({name: Metric.sum(0) for name in ALWAYS}, self._metrics)
        self._metrics = {}
        return found

    async def _call(self, verb: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_S) -> Any:
        found = await self.connection.post(f"/{verb}", body or {}, timeout_s)
        figures = {name: Metric(total, count, Reducer(kind)) for name, (total, count, kind) in found["metrics"].items()}
        self._metrics = merge_metrics(self._metrics, figures)
        return found


__all__ = ["BuiltinServer"]
