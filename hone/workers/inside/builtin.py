"""The built-in engine as a server: `python -m hone.workers.inside.builtin ARGUMENTS`, started by `BuiltinServer`.

    POST /generate         {request_id, token_ids, sampling}  -> {token_ids, logprobs, weight_versions, stop_reason,
                                                                 routed_experts (an .npy file as base64, or null)}
         /score            {request_id, token_ids}            -> {logprobs}, at temperature 1
         /receive_weights  {offer}                            -> {receipts}
         /pause {mode}  /resume  /abort_all  /sleep {level}  /wake_up {tags}
         /look                                                -> {longest}: prompt and completion together, in tokens
    every reply: metrics {name: [total, count, reducer]} since the last reply
    400, 500:    {kind, error}, the exception's class and text
    GET  /health           -> {} when it is ready

It listens on a unix socket in a folder that only its user can enter, and requires the run's token from the environment
variable HONE_TOKEN. JSON only. One event loop handles requests between two steps of the engine. While it receives
weights it does nothing else; the offer has the deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from hone.config import ConfigError, build
from hone.data.routes import text_of_routes
from hone.models.settings import ModelConfig, UseConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import current_platform
from hone.processes.guard import TokenGuard, same_token
from hone.rollout.base import PauseMode, WeightReceipt
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import PromptTooLong, SamplingParams
from hone.weights.base import Adapter
from hone.weights.delivery import receive
from hone.weights.digests.digest import digest_tensors
from hone.weights.digests.packed import size_of
from hone.workers.rollout import adapter_files, engine_config

TOKEN_VARIABLE = "HONE_TOKEN"
IDLE_S = 86_400  # connection timeout: the only client may train for hours between requests

Body = Mapping[str, Any]
Verb = Callable[[Body], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line: one JSON object."""

    model: str
    tokenizer: str
    trust_remote_code: bool
    context: int | None
    dtype: str
    settings: dict[str, Any]  # of `BuiltinSettings`
    replica: str
    adapters: dict[str, str]  # name -> folder
    keep_cache: bool  # see `BuiltinEngine`
    socket: str  # where to listen
    threads: int


class EngineApp:
    """HTTP routes of one engine."""

    def __init__(self, engine: BuiltinEngine, token: str) -> None:
        self._engine = engine
        self._token = token
        self._app = FastAPI(openapi_url=None)
        self._app.add_api_route("/health", self._health, methods=["GET"], response_model=None)
        self._app.add_api_route("/generate", self._generate, methods=["POST"], response_model=None)
        verbs: dict[str, Verb] = {
            "score": self._score,
            "receive_weights": self._receive_weights,
            "pause": self._pause,
            "resume": self._resume,
            "abort_all": self._abort_all,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "look": self._look,
        }
        for name, verb in verbs.items():
            self._app.add_api_route(f"/{name}", self._route(verb), methods=["POST"], response_model=None)
        self.app = TokenGuard(self._app, lambda given: same_token(given, token))

    def _route(self, verb: Verb) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def answer(request: Request) -> JSONResponse:
            return await self._reply(_within(verb, request))

        return answer

    async def _reply(self, result: Awaitable[dict[str, Any]]) -> JSONResponse:
        """Return the result with the engine's metrics, or the error."""
        try:
            found = await result
        except (ValueError, TypeError, KeyError) as error:
            kind = "PromptTooLong" if isinstance(error, PromptTooLong) else "ValueError"
            text = f"{error}" if isinstance(error, ValueError) else f"malformed request: {error!r}"
            return JSONResponse({"kind": kind, "error": text}, status_code=400)
        except RuntimeError as error:  # from the engine or the weight sync
            return JSONResponse({"kind": "RuntimeError", "error": str(error)}, status_code=500)
        metrics = {name: (m.total, m.count, m.reducer.value) for name, m in self._engine.metrics().items()}
        return JSONResponse({**found, "metrics": metrics})

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({})

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(self, request: Request) -> JSONResponse:
        """Return one completion; if the caller hangs up, its row is freed."""
        task = asyncio.ensure_future(self._continue(await request.body()))
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                return JSONResponse({"kind": "RuntimeError", "error": "the caller hung up"}, status_code=500)
            return await self._reply(task)
        finally:
            gone.cancel()

    async def _continue(self, body: bytes) -> dict[str, Any]:
        asked = _object(body)
        sampling = {**asked["sampling"]}
        for key in ("stop", "stop_token_ids"):
            sampling[key] = tuple(sampling.get(key, ()))
        ids = tuple(asked["token_ids"])
        completion = await self._engine.generate(str(asked["request_id"]), ids, SamplingParams(**sampling))
        return {
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "weight_versions": completion.weight_versions,
            "stop_reason": completion.stop_reason.value,
            "routed_experts": text_of_routes(completion.routed_experts),
        }

    async def _score(self, body: Body) -> dict[str, Any]:
        (scores,) = self._engine.score([tuple(body["token_ids"])], 1.0)
        return {"logprobs": scores.tolist()}

    # -------------------------------------------------------------------------------------------------- control

    async def _receive_weights(self, body: Body) -> dict[str, Any]:
        """Connect to the sender and copy its tensors; the receipt has the checksum of the weights now served."""
        with receive(body["offer"], 0, self._token, copy=False, targets=self._engine.weights()) as delivery:
            if isinstance(delivery.payload, Adapter):
                config = delivery.payload.config
                loaded = await self._engine.update_adapter(delivery, config, delivery.version)
            else:
                loaded = await self._engine.update_weights(delivery, delivery.version)
        tensors = loaded.tensors
        digest = digest_tensors(tensors.items(), delivery.method)
        size = sum(size_of(tensor) for tensor in tensors.values())
        return {"receipts": [asdict(WeightReceipt(loaded.replica, loaded.version, digest, len(tensors), size))]}

    async def _pause(self, body: Body) -> dict[str, Any]:
        if body["mode"] not in get_args(PauseMode):
            raise ValueError(f"mode should be one of {', '.join(get_args(PauseMode))}; found {body['mode']!r}")
        await self._engine.pause(body["mode"])
        return {}

    async def _resume(self, body: Body) -> dict[str, Any]:
        await self._engine.resume()
        return {}

    async def _abort_all(self, body: Body) -> dict[str, Any]:
        await self._engine.abort_all()
        return {}

    async def _sleep(self, body: Body) -> dict[str, Any]:
        await self._engine.sleep(body["level"])
        return {}

    async def _wake_up(self, body: Body) -> dict[str, Any]:
        await self._engine.wake_up(tuple(body["tags"]))
        return {}

    async def _look(self, body: Body) -> dict[str, Any]:
        return {"longest": self._engine.longest}


async def _within(verb: Verb, request: Request) -> dict[str, Any]:
    return await verb(_object(await request.body()))


def _object(body: bytes) -> Body:
    try:
        found = json.loads(body)
    except json.JSONDecodeError as error:
        raise ValueError(f"the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the request should be a JSON object, found {found!r:.60}")
    return found


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_engine(arguments: Arguments) -> BuiltinEngine:
    """Build the engine without weights. Raises ModelError or ConfigError for an unsupported model or settings."""
    model = ModelConfig(
        path=arguments.model,
        tokenizer=arguments.tokenizer or None,
        trust_remote_code=arguments.trust_remote_code,
        use=UseConfig(context=arguments.context),
    )
    settings = build(BuiltinSettings, arguments.settings, "the command line", "rollout.builtin")
    config = engine_config(model, arguments.dtype)
    device, adapters = current_platform().device, adapter_files(arguments.adapters)
    engine = BuiltinEngine(settings, config, load_tokenizer(model), device, arguments.replica, adapters)
    engine.keep_cache = arguments.keep_cache
    return engine


def main(command_line: list[str]) -> None:
    """Serve until the process is ended."""
    arguments = Arguments(**json.loads(command_line[0]))
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: hone sets it for the servers that it starts")
    torch.set_num_threads(arguments.threads)
    server = EngineApp(make_engine(arguments), token)
    config = uvicorn.Config(
        server.app,
        uds=arguments.socket,
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(sys.argv[1:])
