"""OpenAI's and Anthropic's routes for the base and for every snapshot, by the endpoint that agents use.

    /oai/api/v1/..., /anthropic/api/..., /v1/... --key, model--> a session of `Endpoint` --generate--> Sampling

`model` is a name of the base, or the path of a snapshot, alone or after the base's name and a semicolon.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from fastapi import Request

from hone.data.rendering import Renderer
from hone.envs.agents.endpoint import PREFIXES, Endpoint
from hone.envs.agents.runner import tool_parser
from hone.envs.agents.sessions import AgentTask
from hone.processes.guard import App, Receive, Scope, Send
from hone.processes.listening import BodyRefused, read_body, replayed
from hone.processes.untrusted_json import parse_json_apart
from hone.service.app import key_of, refusal
from hone.service.disk.checkpoints import SCHEME
from hone.service.disk.registry import Checkpoint, Key
from hone.service.protocol.refusals import BadRequest, Refused
from hone.service.service import Service
from hone.types import SamplingParams

OPEN = 256  # pairs of tenant and model whose session is kept


class Answers:
    """ASGI middleware: answers these routes, and passes all others on."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service
        renderer = Renderer(service.machine.tokenizer)
        self._endpoint = Endpoint(renderer, tool_parser("auto", renderer.template))
        self._sessions: dict[tuple[str, str], str] = {}  # (tenant, model) -> key of the endpoint's session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        prefix = next((one for one in PREFIXES if path.startswith(f"{one}/")), None)
        if scope["type"] != "http" or prefix is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            tenant = self._service.tenant(key_of(request))
            body = await read_body(request, self._service.config.limits.request_bytes)
            key = await self._session(tenant, body)
        except (Refused, BodyRefused) as error:
            await refusal(error)(scope, receive, send)
            return
        others = [one for one in scope["headers"] if one[0] not in (b"authorization", b"x-api-key")]
        headers = [*others, (b"authorization", f"Bearer {key}".encode())]
        await self._endpoint.app({**scope, "headers": headers}, replayed(body, receive), send)

    async def _session(self, tenant: Key, body: bytes) -> str:
        """The key of the session that answers for the model in a body; without a body, for all of the tenant's."""
        try:
            asked: Any = await parse_json_apart(body) if body else {}
        except ValueError as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        model = asked.get("model") if isinstance(asked, dict) else None
        if not isinstance(model, str | None):
            raise BadRequest(f"model = {json.dumps(model)[:80]} should be a text")
        key = self._sessions.pop((tenant.name, model or ""), "")
        if key and not model:  # it lists snapshots, and there may be more by now
            self._endpoint.close_session(key)
        if not (key and model):
            key = self._endpoint.open_session(self._task(tenant, model or ""))
        self._sessions[tenant.name, model or ""] = key
        for old in list(self._sessions)[:-OPEN]:
            self._endpoint.close_session(self._sessions.pop(old))
        return key

    def _task(self, tenant: Key, model: str) -> AgentTask:
        shared, sampling = self._service.shared, self._service.sampling
        base, _, path = model.rpartition(";") if SCHEME in model else (model, "", "")
        snapshot = sampling.name_of(tenant, base or None, path or None) if model else ""
        own = (
            []
            if model
            else self._service.registry.find(Checkpoint, "tenant = ? AND kind = 'sampler_weights'", (tenant.name,))
        )
        return AgentTask(
            generate=lambda request: sampling.generate(tenant.name, snapshot, request),
            sampling=SamplingParams(max_tokens=shared.machine.rollout.longest, adapter=snapshot),
            request_id=f"answer-{secrets.token_hex(8)}",
            seed_of=lambda number: secrets.randbits(62),
            client_sampling=True,
            adapters=tuple(one.path for one in own),
            served=model or shared.base_name,
        )
