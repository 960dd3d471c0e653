"""The built-in engine as a server, started by `BuiltinServer` with one argument, a JSON object.

    POST /generate         {request_id, token_ids, sampling}  -> {token_ids, logprobs, weight_versions, stop_reason,
                                                                 routed_experts (an .npy file as base64, or null)}
         /score            {request_id, token_ids, top_k}     -> {logprobs, top_ids, top_logprobs}, at temperature 1
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
import gc
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
import uvicorn

from hone.config import ConfigError, build
from hone.data.routes import text_of_routes
from hone.models.settings import ModelConfig, UseConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import current_platform
from hone.processes.guard import Receive, Scope, Send, TokenGuard, same_token
from hone.rollout.base import WeightReceipt
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, PauseMode, PromptTooLong, SamplingParams
from hone.weights.base import AdapterTensors
from hone.weights.delivery import receive
from hone.weights.digests.digest import digest_tensors
from hone.weights.digests.packed import size_of
from hone.workers.rollout import adapter_files, engine_config

TOKEN_VARIABLE = "HONE_TOKEN"
IDLE_S = 86_400  # connection timeout: the only client may train for hours between requests
MOST_BYTES = 2**28  # of a request
SAMPLING_TYPES: dict[str, Any] = get_type_hints(SamplingParams)

Body = Mapping[str, Any]
Verb = Callable[[Body], Coroutine[Any, Any, dict[str, Any]]]
R = TypeVar("R")


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
    """The engine's verbs over HTTP, as an ASGI application.

    It has no web framework: with a small model, FastAPI's routing took more time than the engine's steps.
    """

    def __init__(self, engine: BuiltinEngine, token: str) -> None:
        self._engine = engine
        self._token = token
        self._verbs: dict[str, Verb] = {
            "/generate": self._generate,
            "/score": self._score,
            "/receive_weights": self._receive_weights,
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_all": self._abort_all,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/look": self._look,
        }
        self.app = TokenGuard(self._answer, lambda given: same_token(given, token))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope["method"], scope["path"]) == ("GET", "/health"):
            status, found = 200, {}
        elif scope["method"] != "POST" or (verb := self._verbs.get(scope["path"])) is None:
            status, found = 404, {"kind": "ValueError", "error": f"there is no {scope['method']} {scope['path']} here"}
        else:
            status, found = await self._reply(verb, receive)
        await _send(send, status, found)

    async def _reply(self, verb: Verb, receive: Receive) -> tuple[int, dict[str, Any]]:
        """Return status and body: the verb's result with the engine's metrics, or the error."""
        try:
            asked = _object(await _body(receive))
            found = await (_while_wanted(verb(asked), receive) if verb == self._generate else verb(asked))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            kind = "PromptTooLong" if isinstance(error, PromptTooLong) else "ValueError"
            text = f"{error}" if isinstance(error, ValueError) else f"malformed request: {error!r}"
            return 400, {"kind": kind, "error": text}
        except RuntimeError as error:  # from the engine or the weight sync
            return 500, {"kind": "RuntimeError", "error": str(error)}
        metrics = {name: (m.total, m.count, m.reducer.value) for name, m in self._engine.metrics().items()}
        return 200, {**found, "metrics": metrics}

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(self, asked: Body) -> dict[str, Any]:
        sampling = {**asked["sampling"]}
        for key in ("stop", "stop_token_ids"):
            sampling[key] = tuple(sampling.get(key, ()))
        request = GenerationRequest(str(asked["request_id"]), _ids(asked), _checked(SamplingParams(**sampling)))
        completion = await self._engine.generate(request)
        return {
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "weight_versions": completion.weight_versions,
            "stop_reason": completion.stop_reason.value,
            "routed_experts": text_of_routes(completion.routed_experts),
        }

    async def _score(self, body: Body) -> dict[str, Any]:
        if (top_k := int(body["top_k"])) < 0:
            raise ValueError(f"top_k should be at least 0, found {top_k}")
        scored = await self._engine.score(str(body["request_id"]), _ids(body), top_k)
        return asdict(scored)

    # -------------------------------------------------------------------------------------------------- control

    async def _receive_weights(self, body: Body) -> dict[str, Any]:
        """Connect to the sender and copy its tensors; the receipt has the checksum of the weights now served."""
        with receive(body["offer"], 0, self._token, copy=False, targets=self._engine.weights()) as delivery:
            if isinstance(delivery.payload, AdapterTensors):
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
        current_platform().empty_cache()  # otherwise the allocator keeps the memory from the trainer
        return {}

    async def _wake_up(self, body: Body) -> dict[str, Any]:
        await self._engine.wake_up(tuple(body["tags"]))
        return {}

    async def _look(self, body: Body) -> dict[str, Any]:
        return {"longest": self._engine.longest}


async def _body(receive: Receive) -> bytes:
    """The whole body of a request. Raises ValueError for one above MOST_BYTES."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            raise ValueError(f"a request should have at most {MOST_BYTES} bytes")
        more = message.get("more_body", False)
    return b"".join(parts)


async def _send(send: Send, status: int, found: Mapping[str, Any]) -> None:
    body = json.dumps(found).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _object(body: bytes) -> Body:
    try:
        found = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the request should be a JSON object, found {found!r:.60}")
    return found


def _ids(body: Body) -> tuple[int, ...]:
    """The token ids of a request. Raises TypeError: one that is no integer would fail all requests of its batch."""
    ids = tuple(body["token_ids"])
    if set(map(type, ids)) - {int}:
        raise TypeError(f"token_ids should be integers, found {next(one for one in ids if type(one) is not int)!r:.60}")
    return ids


def _checked(sampling: SamplingParams) -> SamplingParams:
    """The same. Raises TypeError for a value of another type, as `_ids` does."""
    for name, kind in SAMPLING_TYPES.items():
        value = getattr(sampling, name)
        several = value if get_origin(kind) is tuple else (value,)
        kinds = [int, float] if kind is float else [one for one in get_args(kind) if one is not ...] or [kind]
        for one in several:
            if type(one) not in kinds:
                raise TypeError(f"sampling.{name} is {one!r:.60}")
    return sampling


async def _while_wanted(work: Coroutine[Any, Any, R], receive: Receive) -> R:
    """The result of `work`, which is cancelled if the caller hangs up. Raises RuntimeError then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(receive))
    gone.add_done_callback(lambda _: task.cancel())  # after the work's end this does nothing
    try:
        return await task
    except asyncio.CancelledError:
        if gone.done():
            raise RuntimeError("the caller hung up") from None
        raise  # this server is shutting down
    finally:
        gone.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
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
    gc.freeze()  # what was imported stays: a full collection would look at a million objects, between two tokens
    gc.enable()
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(sys.argv[1:])
