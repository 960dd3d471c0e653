"""Routes of what is listed, described, deleted: sessions, training runs, checkpoints and exported files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import FileResponse

from hone.service.disk.checkpoints import EXTERNAL, described, path_of, stamp
from hone.service.disk.registry import Checkpoint, Key
from hone.service.protocol import messages
from hone.service.protocol.messages import read
from hone.service.protocol.refusals import BadRequest
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
        self._service = service

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
        return self._service.described_session(call.tenant, call.path["session_id"])

    async def _sampling_session(self, call: Call) -> Any:
        row = self._service.sampling.session(call.tenant.name, call.path["session_id"])
        return {
            "sampler_id": row.id,
            "base_model": self._service.shared.base_name,
            "model_path": row.path or None,
        }

    async def _runs(self, call: Call) -> Any:
        return self._service.runs(call.tenant, *call.page())

    async def _run(self, call: Call) -> Any:
        return self._service.run(call.tenant, call.path["run"])

    async def _checkpoints_of_run(self, call: Call) -> Any:
        self._service.run(call.tenant, call.path["run"])
        found = self._service.checkpoints.of_run(call.tenant.name, call.path["run"])
        return {"checkpoints": [described(one) for one in found], "cursor": None}

    async def _checkpoints(self, call: Call) -> Any:
        return self._service.list_checkpoints(call.tenant, *call.page())

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
        return self._service.weights_info(call.tenant, read(messages.WeightsInfo, call.body).tinker_path)
