"""The built-in engine as a server: `python -m hone.workers.serve SETTINGS`, started by `hone/rollout/remote.py`.

    POST /generate         {request_id, token_ids, sampling}  -> {token_ids, logprobs, weight_versions, stop_reason,
                                                                 routed_experts (an .npy file as base64, or null)}
         /receive_weights  {offer}                            -> {receipts}
         /pause {mode}  /resume  /abort_all  /sleep {level}  /wake_up {tags}  /stop {reason}  /look
    every reply: weight_version, has_base, metrics {name: [total, count, reducer]} since the last reply
    400, 500:    {kind, error}, the exception's class and text

It listens on a unix socket in a folder that only its user can enter, and answers who shows the run's token, which it
has from the environment variable HONE_TOKEN. JSON only. One event loop: requests come in between two steps of the
engine. While weights come in, nothing else happens; the sender's deadline is in the offer.
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
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import current_platform
from hone.rollout.base import PauseMode
from hone.rollout.builtin import BuiltinEngine
from hone.rollout.guard import TokenGuard, same_token
from hone.rollout.settings import BuiltinSettings
from hone.types import PromptTooLong, SamplingParams
from hone.weights.base import Adapter
from hone.weights.door import receive
from hone.workers.rollout import adapter_files, engine_config

TOKEN_VARIABLE = "HONE_TOKEN"
IDLE_S = 86_400  # a connection is kept that long: its client is one process, and may train for hours between requests

Body = Mapping[str, Any]
Verb = Callable[[Body], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Told:
    """What the trainer's side says on the command line, as JSON."""

    model: str
    tokenizer: str
    trust_remote_code: bool
    dtype: str
    settings: dict[str, Any]  # of `BuiltinSettings`
    replica: str
    adapters: dict[str, str]  # name -> folder
    socket: str  # where to listen
    threads: int


class EngineServer:
    """The verbs of one engine as HTTP routes."""

    def __init__(self, engine: BuiltinEngine, token: str) -> None:
        self._engine = engine
        self._token = token
        self._app = FastAPI(openapi_url=None)
        self._app.add_api_route("/generate", self._generate, methods=["POST"], response_model=None)
        verbs: dict[str, Verb] = {
            "receive_weights": self._receive_weights,
            "pause": self._pause,
            "resume": self._resume,
            "abort_all": self._abort_all,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "stop": self._stop,
            "look": self._look,
        }
        for name, verb in verbs.items():
            self._app.add_api_route(f"/{name}", self._route(verb), methods=["POST"], response_model=None)
        self.app = TokenGuard(self._app, lambda shown: same_token(shown, token))

    def _route(self, verb: Verb) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def answer(request: Request) -> JSONResponse:
            return await self._reply(_within(verb, request))

        return answer

    async def _reply(self, result: Awaitable[dict[str, Any]]) -> JSONResponse:
        """The result with what every reply carries, or the error that it ended with."""
        try:
            found = await result
        except (ValueError, TypeError, KeyError) as error:
            kind = "PromptTooLong" if isinstance(error, PromptTooLong) else "ValueError"
            text = f"{error}" if isinstance(error, ValueError) else f"malformed request: {error!r}"
            return JSONResponse({"kind": kind, "error": text}, status_code=400)
        except RuntimeError as error:  # the engine's, or the weight sync's
            return JSONResponse({"kind": "RuntimeError", "error": str(error)}, status_code=500)
        metrics = {name: (m.total, m.count, m.reducer.value) for name, m in self._engine.metrics().items()}
        state = {"weight_version": self._engine.weight_version, "has_base": self._engine.has_base}
        return JSONResponse({**found, **state, "metrics": metrics})

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(self, request: Request) -> JSONResponse:
        """One completion; a caller that hangs up is one less to work for."""
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

    # -------------------------------------------------------------------------------------------------- control

    async def _receive_weights(self, asked: Body) -> dict[str, Any]:
        """Meet the sender and copy what comes; the receipt's digest is of what is then served."""
        with receive(asked["offer"], 0, self._token, copy=False, targets=self._engine.weights()) as delivery:
            if isinstance(delivery.payload, Adapter):
                config = delivery.payload.config
                receipt = await self._engine.update_adapter(delivery, config, delivery.version, delivery.method)
            else:
                receipt = await self._engine.update_weights(delivery, delivery.version, delivery.method)
        return {"receipts": [asdict(receipt)]}

    async def _pause(self, asked: Body) -> dict[str, Any]:
        if asked["mode"] not in get_args(PauseMode):
            raise ValueError(f"pause knows the modes {', '.join(get_args(PauseMode))}; found {asked['mode']!r}")
        await self._engine.pause(asked["mode"])
        return {}

    async def _resume(self, asked: Body) -> dict[str, Any]:
        await self._engine.resume()
        return {}

    async def _abort_all(self, asked: Body) -> dict[str, Any]:
        await self._engine.abort_all()
        return {}

    async def _sleep(self, asked: Body) -> dict[str, Any]:
        await self._engine.sleep(asked["level"])
        return {}

    async def _wake_up(self, asked: Body) -> dict[str, Any]:
        await self._engine.wake_up(tuple(asked["tags"]))
        return {}

    async def _stop(self, asked: Body) -> dict[str, Any]:
        await self._engine.stop(str(asked["reason"]))
        return {}

    async def _look(self, asked: Body) -> dict[str, Any]:
        return {}


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


def make_engine(told: Told) -> BuiltinEngine:
    """The engine that was asked for, without weights. Raises ModelError or ConfigError for what cannot be."""
    model = ModelConfig(
        path=told.model,
        tokenizer=told.tokenizer or None,
        trust_remote_code=told.trust_remote_code,
    )
    settings = build(BuiltinSettings, told.settings, "the command line", "rollout.builtin")
    config = engine_config(model, told.dtype)
    device, adapters = current_platform().device, adapter_files(told.adapters)
    return BuiltinEngine(settings, config, load_tokenizer(model), device, told.replica, adapters)


def main(arguments: list[str]) -> None:
    """Serve until the process is ended."""
    told = Told(**json.loads(arguments[0]))
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: hone sets it for the servers that it starts")
    torch.set_num_threads(told.threads)
    server = EngineServer(make_engine(told), token)
    config = uvicorn.Config(
        server.app,
        uds=told.socket,
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
