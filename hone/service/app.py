"""The routes of the service.

    request --key--> tenant --body within limits--> handler --> JSON, protobuf, or a refusal {error, category}

Paths and fields are those of tinker 0.38. What is not served is refused by name.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from hone.processes.guard import bearer_token
from hone.processes.listening import BodyRefused, decompressed, read_body
from hone.processes.untrusted_json import parse_json_apart
from hone.service.disk.registry import NOBODY
from hone.service.futures import PROTOBUF
from hone.service.listings import Call, Handler, Listings
from hone.service.models import TRAIN
from hone.service.protocol import messages
from hone.service.protocol.messages import read
from hone.service.protocol.refusals import BadRequest, NotFound, Refused, Unavailable
from hone.service.protocol.wire import read_training, training_message
from hone.service.service import Service

LOG = logging.getLogger(__name__)
API = "/api/v1"
FLAGS = {  # of the client: the defaults of its SDK, said aloud
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
FIXED: dict[str, Any] = {  # answers to every client
    "client/config": FLAGS,
    "client/dynamic_config": {"refresh_interval_sec": 300, "sample_cancel_enabled": False},
    "telemetry": {"status": "accepted"},  # and not kept
}
NOT_SERVED = {  # path -> what to do instead
    "create_custom_loss": "forward_backward_custom computes custom losses in the client",
    "copy_weights": "load a checkpoint into a new model and save it there",
    "join_sampling_session": "clients choose their own numbers",
    "retrieve_futures": "ask retrieve_future for each request",
    "auth/token": "send the key with each request",
    "sessions/search": "list training_runs or checkpoints",
    "sessions/{session_id}/project": "there are no projects",
    "sessions/{session_id}/trace_export": "traces are in the client",
    "sessions": "list training_runs",
    "cancel_future": "a request that was taken runs; finish its session to end those that wait",
    "billing/usage/{what:path}": "nothing is billed here",
    "audit": "the log of the service has its events",
}


def key_of(request: Request) -> str:
    """The key of a request: X-API-Key, or a bearer token."""
    return request.headers.get("x-api-key") or bearer_token(request.scope)


def refusal(error: Refused | BodyRefused) -> JSONResponse:
    if isinstance(error, BodyRefused):
        error = BadRequest(str(error), error.status)
    return JSONResponse({"error": str(error), "category": error.category}, error.status)


class ServiceApp:
    """An ASGI application around a service that has started."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.app = FastAPI(openapi_url=None)
        self._listings = Listings(service)
        for path, handler in self._posts().items():
            self._add("POST", f"/{path}", handler)
        self._add("GET", "/healthz", self._health, public=True)
        self._add("GET", "/external/{secret}/{name}", self._listings.external_file, public=True)
        self._add("GET", "/get_server_capabilities", self._capabilities)
        for path, instead in NOT_SERVED.items():
            for method in ("GET", "POST", "PUT"):
                self._add(method, f"/{path}", partial(self._refuse, f"{path} is not served here: {instead}"))
        for method, path, handler in self._listings.routes():
            self._add(method, path, handler)
        self._add("POST", "/forward_backward", self._forward_backward, raw=True)
        self.app.add_api_route("/{path:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE"])

    def _posts(self) -> dict[str, Handler]:
        return {
            "retrieve_future": self._retrieve,  # routes are tried in this order: the frequent ones first
            "asample": self._sample,
            **{path: partial(self._say, answer) for path, answer in FIXED.items()},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "optim_step": self._command("optim_step"),
            "save_weights": self._command("save_weights"),
            "save_weights_for_sampler": self._command("save_weights_for_sampler"),
            "save_weights_external": self._command("save_weights_external"),
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "weights_info": self._listings.weights_info,
        }

    def _add(self, method: str, path: str, handler: Handler, *, public: bool = False, raw: bool = False) -> None:
        async def answering(request: Request) -> Response:
            try:
                found = await handler(await self._call(request, public, raw))
            except (Refused, BodyRefused) as error:
                return refusal(error)
            except Exception:
                LOG.exception("%s %s failed", method, path)
                return refusal(Unavailable("the service failed; its log says why"))
            return found if isinstance(found, Response) else JSONResponse(found)

        self.app.add_api_route(f"{API}{path}", answering, methods=[method], response_model=None)

    async def _call(self, request: Request, public: bool, raw: bool) -> Call:
        """Check the key and read the body. Raises Refused."""
        path = {name: str(value) for name, value in request.path_params.items()}
        if public:
            return Call(NOBODY, request, None, path)
        tenant = self._service.tenant(key_of(request))
        if raw or request.method not in ("POST", "PUT"):
            return Call(tenant, request, None, path)
        text = await read_body(request, self._service.config.limits.request_bytes)
        try:
            body = await parse_json_apart(text or b"{}")
        except ValueError as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        return Call(tenant, request, body, path)

    async def _unknown(self, path: str) -> Response:
        return refusal(NotFound(f"/{path} is not served here"))

    async def _say(self, answer: Any, call: Call) -> Any:
        return answer

    async def _refuse(self, why: str, call: Call) -> Any:
        raise BadRequest(why)

    # ------------------------------------------------------------------------------------------------- the client

    async def _health(self, call: Call) -> Any:
        if (error := self._service.failed()) is not None:
            raise Unavailable(f"the service failed: {error}")
        return {"status": "ok"}

    async def _capabilities(self, call: Call) -> Any:
        shared = self._service.shared
        longest = min(shared.machine.rollout.longest, shared.config.training.max_tokens_per_microbatch)
        facts = {"max_context_length": longest, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **facts} for name in shared.names]}

    async def _create_session(self, call: Call) -> Any:
        return self._service.create_session(call.tenant, read(messages.CreateSession, call.body))

    async def _heartbeat(self, call: Call) -> Any:
        self._service.heartbeat(call.tenant, read(messages.SessionOf, call.body).session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, call: Call) -> Any:
        message = read(messages.Finish, call.body)
        why = (message.reason or {}).get("type", "finished")
        await self._service.finish(call.tenant, call.path["session_id"], f"its client ended it ({why})")
        return {}

    # --------------------------------------------------------------------------------------------------- training

    async def _create_model(self, call: Call) -> Any:
        return self._created(call, read(messages.CreateModel, call.body))

    def _created(self, call: Call, message: messages.CreateModel | messages.LoadWeights) -> Any:
        session = self._service.session(call.tenant, message.session_id or "")
        request_id = self._service.training.create(call.tenant, session, message)
        return {"request_id": request_id, "model_id": f"{session.id}:train:{message.model_seq_id}"}

    async def _get_info(self, call: Call) -> Any:
        row = self._service.training.model(call.tenant.name, read(messages.ModelOf, call.body).model_id).row
        lora, shared = row.lora_config, self._service.shared
        return {
            "type": "get_info",
            "model_id": row.id,
            "model_name": shared.base_name,
            "model_data": {
                "arch": shared.machine.rollout.architecture,
                "model_name": shared.base_name,
                "tokenizer_id": shared.tokenizer_folder,
            },
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora["rank"],
            "optimizer_config": {"type": "adamw"},
        }

    def _command(self, kind: str) -> Handler:
        """A route that takes a command of a model. What is wrong in it, beyond its place, is its result."""

        async def handler(call: Call) -> Any:
            given = call.body if isinstance(call.body, dict) else {}
            place = read(messages.Command, {name: given[name] for name in ("model_id", "seq_id") if name in given})
            body = json.dumps(call.body, sort_keys=True).encode()
            request_id = self._service.training.submit(call.tenant, place.model_id, place.seq_id, kind, body)
            return {"request_id": request_id, "model_id": place.model_id}

        return handler

    async def _load_weights(self, call: Call) -> Any:
        if isinstance(call.body, dict) and call.body.get("model_id") is not None:
            return await self._command("load_weights")(call)
        return self._created(call, read(messages.LoadWeights, call.body))

    async def _forward_backward(self, call: Call) -> Any:
        headers, limits = call.request.headers, self._service.config.limits
        if (kind := headers.get("content-type", "").partition(";")[0].strip()) != PROTOBUF:
            raise BadRequest(f"Content-Type {kind or 'none'} is not served; send {PROTOBUF} (SDK 0.25 and later)", 415)
        packed = await read_body(call.request, limits.request_bytes)
        encoding = headers.get("content-encoding", "").lower()
        body = await asyncio.to_thread(decompressed, packed, encoding, limits.decompressed_bytes)
        training = self._service.training
        try:
            parsed = await asyncio.to_thread(read_training, body, limits.dense_elements)
        except BadRequest:  # which is its result, in its turn: later commands of its model wait for it
            broken = training_message(body)
            request_id = training.submit(call.tenant, broken.model_id, broken.seq_id, TRAIN, body)
            return {"request_id": request_id, "model_id": broken.model_id}
        if parsed.seq_id < 1:
            raise BadRequest(f"seq_id = {parsed.seq_id}: it should be 1 or more")
        return {"request_id": training.submit_training(call.tenant, parsed), "model_id": parsed.model_id}

    async def _retrieve(self, call: Call) -> Any:
        message = read(messages.RetrieveFuture, call.body)
        limits, futures = self._service.config.limits, self._service.futures
        found = await futures.wait(message.request_id, call.tenant.name, limits.poll_s)
        if found is None:
            state = "active" if self._service.shared.quotas.has_room(call.tenant.name) else "paused_rate_limit"
            return JSONResponse({"type": "try_again", "request_id": message.request_id, "queue_state": state}, 408)
        if found.error:
            return {"error": found.error, "category": found.category}
        large = len(found.body) > limits.metadata_bytes
        if large and message.allow_metadata_only and futures.announce(message.request_id):
            return {
                "status": "complete_metadata",
                "request_id": message.request_id,
                "response_payload_size": len(found.body),
            }
        futures.note_fetched(message.request_id)
        return Response(found.body, media_type=found.media)

    # --------------------------------------------------------------------------------------------------- sampling

    async def _create_sampling_session(self, call: Call) -> Any:
        message = read(messages.CreateSamplingSession, call.body)
        self._service.session(call.tenant, message.session_id)
        session_id = self._service.sampling.create(call.tenant, message)
        return {"type": "create_sampling_session", "sampling_session_id": session_id}

    async def _sample(self, call: Call) -> Any:
        request_id, ids = self._service.sampling.submit(call.tenant, read(messages.Sample, call.body))
        return {"request_id": request_id, "sample_sequence_ids": ids}
