"""Routes of what is listed, described, deleted: sessions, training runs, checkpoints and exported files."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import FileResponse

from hone.service.disk.checkpoints import EXTERNAL, SAMPLING, STATE, described, path_of, stamp
from hone.service.disk.registry import Checkpoint, Key, Model, SnapshotRow
from hone.service.protocol import messages
from hone.service.protocol.messages import read
from hone.service.protocol.refusals import BadRequest, NotFound
from hone.service.service import Service

PAGE = 20  # rows of a list, unless a client asks for another number


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a tenant."""

    tenant: Key
    request: Request
    body: Any = None  # parsed JSON; None: the route reads its own, or has none
    path: dict[str, str] = field(default_factory=dict)

    def page(self) -> tuple[int, int]:
        """`limit` and `offset` of a list. Raises BadRequest."""
        found = []
        for name, default in (("limit", PAGE), ("offset", 0)):
            text = self.request.query_params.get(name, str(default))
            if not text.isdecimal():
                raise BadRequest(f"{name} = {text!r:.60} should be a number, 0 or more")
            found.append(int(text))
        return found[0], found[1]


Handler = Callable[[Call], Awaitable[Any]]


class Listings:
    """Handlers of these routes."""

    def __init__(self, service: Service) -> None:
        self._service, self._registry = service, service.registry

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        one = "/training_runs/{run}/checkpoints/{kind}/{name}"
        return [
            ("GET", "/sessions/{session_id}", self._session),
            ("GET", "/samplers/{session_id}", self._sampling_session),
            ("GET", "/training_runs", self._runs),
            ("GET", "/training_runs/{run}", self._run),
            ("GET", "/training_runs/{run}/checkpoints", self._checkpoints_of_run),
            ("GET", "/checkpoints", self._checkpoints),
            ("DELETE", one, self._delete_checkpoint),
            ("PUT", f"{one}/ttl", self._set_ttl),
            ("POST", f"{one}/publish", self._refuse_publishing),
            ("DELETE", f"{one}/publish", self._refuse_publishing),
            ("GET", f"{one}/external_weights_urls", self._external_urls),
        ]

    async def _session(self, call: Call) -> Any:
        found = self._service.any_session(call.tenant, call.path["session_id"])
        facts = json.loads(found.facts)
        return {
            "training_run_ids": [one.id for one in self._registry.find(Model, "session = ?", (found.id,))],
            "sampler_ids": [one.id for one in self._registry.find(SnapshotRow, "session = ?", (found.id,))],
            "user_metadata": facts["user_metadata"],
            "display_name": facts["display_name"],
        }

    async def _sampling_session(self, call: Call) -> Any:
        row = self._service.sampling.session(call.tenant.name, call.path["session_id"])
        return {
            "sampler_id": row.id,
            "base_model": self._service.shared.base_name,
            "model_path": row.path or None,
        }

    async def _runs(self, call: Call) -> Any:
        return self._page(call, Model, "training_runs", self._described_run)

    async def _run(self, call: Call) -> Any:
        row = self._registry.one(Model, "id = ? AND tenant = ?", (call.path["run"], call.tenant.name))
        if row is None:
            raise NotFound(f"there is no training run {call.path['run']!r:.200}")
        return self._described_run(row)

    async def _checkpoints_of_run(self, call: Call) -> Any:
        await self._run(call)
        found = self._service.checkpoints.of_run(call.tenant.name, call.path["run"])
        return {"checkpoints": [described(one) for one in found], "cursor": None}

    async def _checkpoints(self, call: Call) -> Any:
        return self._page(call, Checkpoint, "checkpoints", described)

    def _page(self, call: Call, cls: type[Any], name: str, describe: Callable[[Any], Any]) -> dict[str, Any]:
        """The rows of a tenant that a request asks for, the newest first, and where they are in the whole list."""
        limit, offset = call.page()
        rows = self._registry.find(cls, "tenant = ? ORDER BY created DESC", (call.tenant.name,))
        cursor = {"limit": limit, "offset": offset, "total_count": len(rows)}
        return {name: [describe(one) for one in rows[offset : offset + limit]], "cursor": cursor}

    def _described_run(self, row: Model) -> dict[str, Any]:
        last: dict[str, Checkpoint] = {one.kind: one for one in self._service.checkpoints.of_run(row.tenant, row.id)}
        state, snapshot = last.get(STATE), last.get(SAMPLING)
        lora = row.lora_config
        return {
            "training_run_id": row.id,
            "base_model": self._service.shared.base_name,
            "model_owner": row.tenant,
            "is_lora": lora is not None,
            "corrupted": False,
            "lora_rank": None if lora is None else lora.get("rank"),  # not known while its checkpoint is loaded
            "last_request_time": stamp(row.used),
            "last_checkpoint": None if state is None else described(state),
            "last_sampler_checkpoint": None if snapshot is None else described(snapshot),
            "user_metadata": json.loads(row.metadata),
        }

    def _checkpoint(self, call: Call) -> Checkpoint:
        path = path_of(call.path["run"], call.path["kind"], call.path["name"])
        return self._service.checkpoints.find(call.tenant.name, path)

    async def _delete_checkpoint(self, call: Call) -> Any:
        checkpoint = self._checkpoint(call)
        self._service.sampling.retire(checkpoint.folder)
        self._service.checkpoints.remove(checkpoint)
        return {}

    async def _set_ttl(self, call: Call) -> Any:
        self._service.checkpoints.set_ttl(self._checkpoint(call), read(messages.SetTtl, call.body).ttl_seconds)
        return {}

    async def _refuse_publishing(self, call: Call) -> Any:
        raise BadRequest("checkpoints are not published here: each tenant sees its own only")

    async def _external_urls(self, call: Call) -> Any:
        checkpoint = self._checkpoint(call)
        if checkpoint.kind != EXTERNAL:
            raise BadRequest(f"{checkpoint.path} is no export; save_weights_external makes one")
        urls, expires = self._service.checkpoints.urls(checkpoint, str(call.request.base_url).rstrip("/"))
        return {"urls": urls, "expires": stamp(expires)}

    async def external_file(self, call: Call) -> Any:
        return FileResponse(self._service.checkpoints.exported_file(call.path["secret"], call.path["name"]))

    async def weights_info(self, call: Call) -> Any:
        path = read(messages.WeightsInfo, call.body).tinker_path
        lora = json.loads(self._service.checkpoints.find(call.tenant.name, path).lora)
        adapted = {} if lora is None else {name: lora[name] for name in ("train_mlp", "train_attn")}
        return {
            "base_model": self._service.shared.base_name,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora["rank"],
            "optimizer_config": {"type": "adamw"},
            **adapted,
            "train_unembed": False,
        }
