"""A vLLM server with a frozen model, and adapters that come and go while it answers.

    serve_adapter(name, folder) --every worker reads it--> digest --requests name it--> drop_adapter(name)

vLLM keeps KV under the name of an adapter, so a name is used once, and nothing has to be dropped from its cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.rollout.adapters import check_adapter
from hone.rollout.base import ServerSpec
from hone.rollout.servers.connection import CONTROL_S
from hone.rollout.servers.vllm import VllmServer
from hone.types import Scored

PLACES = 4  # adapters at a time, unless `rollout.engine.max_loras` says otherwise


class VllmSnapshots(VllmServer):
    """Its methods are called one at a time, except for requests."""

    def _reset(self) -> None:
        super()._reset()
        self._scoring: dict[str, str] = {}  # scoring request -> its adapter
        self._names: set[str] = set()  # of adapters that requests may name
        self._limits = replace(self._limits, adapters=self._names)

    @classmethod
    def _adapter_options(cls, spec: ServerSpec, config: Any) -> dict[str, Any]:
        return super()._adapter_options(spec, config) | {"max_loras": PLACES + 1}  # one stays empty, see there

    @property
    def places(self) -> int:
        """Adapters that it serves at a time."""
        return int(self._options["max_loras"]) - 1

    async def serve_adapter(self, name: str, folder: Path) -> str:
        """Serve the adapter in a folder to requests that name it; there must be a place for it.

        Returns the digest of what the workers read. Raises RuntimeError unless vLLM loads the adapter whole.
        """
        digest = await self._load_adapter(name, str(folder), CONTROL_S)
        self._names.add(name)
        return digest

    async def drop_adapter(self, name: str) -> None:
        """Serve an adapter no more; no request of it may run."""
        self._names.discard(name)
        number, _ = self._adapters.pop(name)
        await self._unload(name, number)

    async def score(self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0, adapter: str = "") -> Scored:
        """See `ServerAdapter.score`; an empty `adapter` is the frozen model."""
        if not adapter:
            return await super().score(request_id, token_ids, top_k)
        check_adapter(adapter, self._names)
        self._scoring[request_id] = adapter
        try:
            return await super().score(request_id, token_ids, top_k)
        finally:
            del self._scoring[request_id]

    def _scored_adapter(self, request_id: str) -> str | None:
        return self._scoring.get(request_id)


__all__ = ["VllmSnapshots"]
