"""An OpenAI-compatible door to the policy: an agent that knows `base_url` and a key is recorded token by token.

    agent program --HTTP, loopback, its key--> Endpoint --AgentSession: history -> ids--> generate(ids) --> rollout
         ^--------- text, tool calls -----------'   `-- what was sampled, committed before it is told --> trajectories

    async with Endpoint(language) as endpoint:
        session = endpoint.admit(AgentTask(generate, sampling, "1/7/0", seed_of))
        await program(endpoint.base_url, session_key)
        endpoint.dismiss(session_key).trajectories("task/7", 0)

Chat completions and completions, whole or streamed, `n`, `stop`, log-probs, tool calls. A key opens one session and
nothing else; after `dismiss` it opens nothing. A request whose `model` is an adapter of its task is answered by that
one. It runs on the caller's event loop and waits for nothing but `generate`, whose deadline is the rollout's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from hone.config import ConfigError
from hone.rollout.guard import LOOPBACK, TokenGuard, bearer_token
from hone.rollout.openai_protocol import Answer, BadRequest, ChatAsked, Reply, TextAsked, error_body, supported
from hone.rollout.sessions import AgentSession, AgentTask, Language
from hone.rollout.tool_calls import ParseFn, parse_hermes
from hone.types import Completion, PromptTooLong, SamplingParams, StopReason

START_S, STOP_S = 10.0, 10.0
BUDGET_USED, TOO_LONG = "token_budget_exhausted", "context_length_exceeded"  # what a refusal says of length
LOG = logging.getLogger(__name__)
HUNG_UP = 499  # nobody reads it


class Endpoint:
    """One HTTP server for all agents of a run."""

    def __init__(self, language: Language, parse_tools: ParseFn = parse_hermes) -> None:
        """`parse_tools` finds tool calls in generated text, where a request offers tools."""
        self._language = language
        self._parse_tools = parse_tools
        self._sessions: dict[str, AgentSession] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        app = FastAPI(openapi_url=None)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions", self._text, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        self._app = TokenGuard(app, self._sessions.__contains__)

    # --------------------------------------------------------------------------------------- start, stop, sessions

    async def __aenter__(self) -> Endpoint:
        self._listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _InLoopServer(config)
        self._serving = asyncio.create_task(self._server.serve([self._listener]), name="agent endpoint")
        async with asyncio.timeout(START_S):
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._serving is not None
        assert self._listener is not None
        self._server.should_exit = True
        try:
            await asyncio.wait_for(self._serving, STOP_S)
        finally:
            self._listener.close()

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given; valid while the endpoint is open."""
        assert self._listener is not None
        return f"http://{LOOPBACK}:{self._listener.getsockname()[1]}/v1"

    def admit(self, task: AgentTask) -> str:
        """Open a session; its key, which is also its only name."""
        key = f"hone-{secrets.token_hex(24)}"
        self._sessions[key] = AgentSession(task, self._language)
        return key

    def session(self, key: str) -> AgentSession:
        return self._sessions[key]

    def dismiss(self, key: str) -> AgentSession:
        """End a session: its key opens nothing any more. What it recorded is in it."""
        return self._sessions.pop(key)

    # ------------------------------------------------------------------------------------------------- requests

    async def _models(self, request: Request) -> Response:
        names = ("policy", *self._sessions[bearer_token(request.scope)].task.adapters)
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "hone"} for name in names]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, ChatAsked)

    async def _text(self, request: Request) -> Response:
        return await self._serve(request, TextAsked)

    async def _serve(self, request: Request, kind: type[ChatAsked] | type[TextAsked]) -> Response:
        """Answer one request; its errors in the protocol's form. What the client asked wrongly is a 400."""
        session = self._sessions[bearer_token(request.scope)]
        try:
            with _asked_wrongly():
                asked = kind(**supported(json.loads(await request.body())))
            reply = await self._answer_unless_gone(request, session, asked)
        except (ConfigError, ValueError) as error:  # what was asked, how it renders, or the engine's refusal
            message, code = _reason(error)
            session.outgrown = code in (BUDGET_USED, TOO_LONG)
            return _refuse(400, message, code)
        except Exception as error:
            session.failure = error
            LOG.exception("request of session %s failed", session.task.request_id)
            return _refuse(500, f"the rollout engine failed: {error}", "engine_failed")
        if reply is None:
            return Response(status_code=HUNG_UP)
        if asked.stream:
            return StreamingResponse(reply.stream(asked.wants_usage), media_type="text/event-stream")
        return JSONResponse(reply.whole())

    async def _answer_unless_gone(
        self, request: Request, session: AgentSession, asked: ChatAsked | TextAsked
    ) -> Reply | None:
        """The reply; None if the client hung up before there was one: then nothing more is sampled, or recorded."""
        answer = asyncio.create_task(self._answer(session, asked))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return await answer
            session.hung_up_at = asyncio.get_running_loop().time()
            return None
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _answer(self, session: AgentSession, asked: ChatAsked | TextAsked) -> Reply:
        """Generate within the budget."""
        if asked.model in session.task.adapters:
            return await self._consult(session, asked)
        count = asked.n or 1
        longest = await session.room(asked.longest, count)
        if longest < 1:
            left = f"{session.budget} left for {count} answers"
            raise BadRequest(f"the episode's budget of sampled tokens is used up ({left})", BUDGET_USED)
        with session.reserved(longest * count):
            return await self._generate(session, asked, longest)

    async def _consult(self, session: AgentSession, asked: ChatAsked | TextAsked) -> Reply:
        """An answer of an adapter beside the policy: not the policy's, so it is not recorded and costs no budget."""
        task = session.task
        with _asked_wrongly():
            if isinstance(asked, ChatAsked):
                prompt = session.rendered(asked.messages, asked.offered)
            else:
                prompt = session.encoded(asked.only_prompt)
            sampling = asked.sampling(task.sampling, task.sampling.max_tokens, task.client_sampling)
        completions = await self._sample(session, prompt, replace(sampling, adapter=asked.model), asked.n or 1)
        with _our_fault():
            answers = [self._tell(one, asked) for one in completions]
        return Reply(asked.model, answers, len(prompt), isinstance(asked, ChatAsked), asked.return_token_ids)

    async def _generate(self, session: AgentSession, asked: ChatAsked | TextAsked, longest: int) -> Reply:
        """Generate, record, and only then tell."""
        chat = isinstance(asked, ChatAsked)
        with _asked_wrongly():
            if isinstance(asked, ChatAsked):
                opening = session.open_chat(asked.messages, asked.offered)
            else:
                opening = session.open_text(asked.only_prompt)
        try:
            with _asked_wrongly():
                sampling = asked.sampling(session.task.sampling, longest, session.task.client_sampling)
            completions = await self._sample(session, opening.prompt, sampling, asked.n or 1)
            with _our_fault():
                answers = [self._tell(one, asked) for one in completions]
                recorded = [(one.completion, one.message if chat else None) for one in answers]
                session.commit(opening, recorded)  # type: ignore[arg-type]  a message has a message's keys
        except BaseException:
            session.give_up(opening)
            raise
        return Reply(asked.model, answers, len(opening.prompt), chat, asked.return_token_ids)

    async def _sample(
        self, session: AgentSession, prompt: tuple[int, ...], sampling: SamplingParams, count: int
    ) -> Sequence[Completion]:
        task = session.task
        numbers = [session.next_number() for _ in range(count)]
        session.waiting += count
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        task.generate(  # type: ignore[arg-type]  a GenerateFn gives a coroutine
                            f"{task.request_id}/{number}", prompt, replace(sampling, seed=task.seed_of(number))
                        )
                    )
                    for number in numbers
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            session.waiting -= count
        completions = [await one for one in running]
        if any(one.stop_reason is StopReason.ABORTED for one in completions):
            raise RuntimeError("the request was aborted")
        return completions

    def _tell(self, completion: Completion, asked: ChatAsked | TextAsked) -> Answer:
        """What the client is told of a completion: no special tokens, nothing from a stop string on, calls apart."""
        text = self._language.decode(completion.token_ids)
        ends = [place for stop in asked.stops if (place := text.find(stop)) >= 0]
        text = text[: min(ends)] if ends else text
        calls: list[dict[str, Any]] = []
        if isinstance(asked, ChatAsked) and asked.offered:
            text, found = self._parse_tools(text)
            calls = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": one} for one in found]
        wanted = asked.logprobs if isinstance(asked, ChatAsked) else asked.logprobs is not None
        tokens = [self._language.decode([one], keep_special=True) for one in completion.token_ids] if wanted else []
        return Answer(completion, text, tuple(calls), tuple(tokens))


class _InLoopServer(uvicorn.Server):
    """A server beside other work on one loop: signals belong to the run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _asked_wrongly() -> Iterator[None]:
    """Lookups and conversions that fail here fail for what the client has sent."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise BadRequest(f"{type(error).__name__}: {error}") from error


@contextmanager
def _our_fault() -> Iterator[None]:
    """What fails here is no fault of the request."""
    try:
        yield
    except ValueError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _disconnected(request: Request) -> None:
    """Returns when the client has hung up; its request has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reason(error: Exception) -> tuple[str, str]:
    """Why a request is refused: the message for people, and the code for programs."""
    if isinstance(error, BadRequest):
        return str(error), error.code
    if isinstance(error, PromptTooLong):
        return str(error), TOO_LONG
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']} (found {first['input']!r:.80})", "invalid_request"
    return f"{type(error).__name__}: {error}", "invalid_request"


def _refuse(status: int, message: str, code: str) -> JSONResponse:
    """An error that the client does not answer with a second attempt: it would be recorded as another sample."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(error_body(message, kind, code), status, headers={"x-should-retry": "false"})


__all__ = ["AgentTask", "Endpoint"]
