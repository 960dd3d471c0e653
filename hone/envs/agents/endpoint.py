"""HTTP endpoint of the policy, which records every token that an agent samples.

    agent program --HTTP, loopback, its key--> Endpoint --AgentSession: history -> ids--> generate(ids) --> rollout
         ^--------- text, tool calls -----------'   `-- what was sampled, committed before the reply --> trajectories

    async with Endpoint(language) as endpoint:
        session = endpoint.open_session(AgentTask(generate, sampling, "1/7/0", seed_of))
        await program(endpoint.base_url, session_key)
        endpoint.close_session(session_key).trajectories("task/7", 0)

A finished model is served the same way (`hone serve`): the task says `served`, nothing is recorded, and an answer in
Chat Completions is streamed while it is sampled (`live`).

It speaks the protocols of `DIALECTS`, whole or streamed. A key is valid for one session, until `close_session`; it may
also stand in the path (`/s/KEY/v1`). An adapter of the task answers requests that name it as `model`. With roles, the
policy answers those that name a role, each on the tracks of that role.
The endpoint runs on the caller's event loop and waits only for `generate`, which has the rollout's deadline.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from hone.config import ConfigError
from hone.envs.agents.answers import answer_to, check_tools, echo_of, opening_for, require_trainable
from hone.envs.agents.anthropic_messages import AnthropicMessages
from hone.envs.agents.completions import ChatCompletions, TextCompletions
from hone.envs.agents.images import has_images
from hone.envs.agents.live import begun, in_pieces, is_plain
from hone.envs.agents.protocol import BadRequest, ChatRequest, Dialect, Echo, Reply, TextRequest
from hone.envs.agents.responses import Responses
from hone.envs.agents.sessions import AgentSession, AgentTask
from hone.envs.base import Language
from hone.envs.tool_calls import ParseFn, hermes
from hone.processes.guard import LOOPBACK, App, PathToken, Receive, Scope, Send, TokenGuard, bearer_token
from hone.processes.listening import LoopServer, Refusals, bounded, read_body
from hone.processes.untrusted_json import parse_json
from hone.types import Completion, GenerationRequest, Image, Message, PromptTooLong, SamplingParams, Scored, StopReason

START_S, STOP_S = 10.0, 10.0
MOST_CONNECTIONS, CONNECTIONS_EACH = 4096, 4  # at least so many, and so many for each session
THREADS = 4  # of its own: the run's default threads stay free, whatever agents send
LARGEST_BODY = 16 << 20  # bytes of one request
ON_THE_LOOP = 1 << 16  # bytes; a longer request is tokenised in a thread, because that takes 4 s for each MiB
BUDGET_EXHAUSTED, TURNS_EXHAUSTED, TOO_LONG = (  # error codes for length
    "token_budget_exhausted",
    "turns_exhausted",
    "context_length_exceeded",
)
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": TextCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
    "/v1/v1/messages": AnthropicMessages(),  # Anthropic's clients append /v1 to the base URL
}
PREFIXES = ("/v1", "/oai/api/v1", "/anthropic/api/v1", "/anthropic/api")  # the others as on a training service
LOG = logging.getLogger(__name__)
PlaceFn = Callable[..., Awaitable[Any]]  # runs a function with its arguments, on the event loop or in a thread
CLIENT_GONE = 499  # the status for logs; the client is gone


class Endpoint:
    """HTTP server for all agents of a run."""

    def __init__(self, language: Language, parse_tools: ParseFn | None = hermes, port: int = 0) -> None:
        """`parse_tools` finds tool calls in generated text; None: requests that offer tools are refused.

        `port` 0: any that is free.
        """
        self._language = language
        self._port = port
        self._parse_tools = parse_tools
        self._sessions: dict[str, AgentSession] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(THREADS, "agent endpoint")
        self._listener: socket.socket | None = None
        app = FastAPI(openapi_url=None)
        for path, dialect in DIALECTS.items():
            app.add_api_route(path, self._answering(dialect), methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        self.app = PathToken(_under_v1(TokenGuard(app, self._sessions.__contains__)))
        """The ASGI application, for a server that has others beside it."""

    # --------------------------------------------------------------------------------------- start, stop, sessions

    async def __aenter__(self) -> Endpoint:
        self._listener = socket.create_server((LOOPBACK, self._port), backlog=1024)
        config = uvicorn.Config(
            self.app,
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            http=bounded(Refusals("agent endpoint"), self._most_connections),
        )
        self._server = LoopServer(config)
        self._serving = asyncio.create_task(self._server.serve([self._listener]), name="agent endpoint")
        async with asyncio.timeout(START_S):
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(0.005)
        return self

    def _most_connections(self) -> int:
        return max(MOST_CONNECTIONS, CONNECTIONS_EACH * len(self._sessions))

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
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def ended(self) -> None:
        """Wait for the end of the server, which comes with the end of this endpoint, or if it fails."""
        assert self._serving is not None
        await asyncio.wait((self._serving,))

    @property
    def base_url(self) -> str:
        """URL for clients; valid while the endpoint is open."""
        assert self._listener is not None
        return f"http://{LOOPBACK}:{self._listener.getsockname()[1]}/v1"

    def url_of(self, key: str) -> str:
        """URL with the key of a session in its path: a client may then send any key, or none."""
        return self.base_url.removesuffix("/v1") + f"/s/{key}/v1"

    def open_session(self, task: AgentTask, key: str = "") -> str:
        """Open a session and return its key, which also identifies it; without a `key`, a new one."""
        key = key or f"hone-{secrets.token_hex(24)}"
        self._sessions[key] = AgentSession(task, self._language)
        return key

    def session(self, key: str) -> AgentSession:
        return self._sessions[key]

    def close_session(self, key: str) -> AgentSession:
        """End a session and return it with its record; its key is no longer valid."""
        return self._sessions.pop(key)

    async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do work in a thread of the endpoint. It is short, and goes on if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # ------------------------------------------------------------------------------------------------- requests

    async def _models(self, request: Request) -> Response:
        task = self._sessions[bearer_token(request.scope)].task
        names = (*(task.roles or (task.served or "policy",)), *task.adapters)
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "hone"} for name in names]
        return _AsciiJson({"object": "list", "data": models})

    def _answering(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def answering(request: Request) -> Response:
            return await self._serve(request, dialect)

        return answering

    async def _serve(self, request: Request, dialect: Dialect) -> Response:
        """Answer one request, or return an error in the protocol's form (400 for an invalid request)."""
        session = self._sessions[bearer_token(request.scope)]
        try:
            with _client_errors():
                text = await read_body(request, LARGEST_BODY)
                place = _in_turn if len(text) <= ON_THE_LOOP else self.in_thread
                body = dialect.read(await place(parse_json, text))
                if isinstance(body, ChatRequest) and has_images(body.messages):
                    place = self.in_thread  # a few kilobytes may be an image of 33 million pixels
                check_tools(body, self._parse_tools)
            response = await self._answer_unless_gone(request, session, body, place, dialect)
        except (ConfigError, ValueError) as error:  # invalid request, rendering, or refused by the engine
            message, code = _reason(error)
            session.refused_for_length = code in (BUDGET_EXHAUSTED, TURNS_EXHAUSTED, TOO_LONG)
            return _refuse(dialect, 400, message, code)
        except Exception as error:
            session.failure = error
            LOG.exception("request of session %s failed", session.task.request_id)
            return _refuse(dialect, 500, f"the rollout engine failed: {error}", "engine_failed")
        return Response(status_code=CLIENT_GONE) if response is None else response

    async def _answer_unless_gone(
        self,
        request: Request,
        session: AgentSession,
        body: ChatRequest | TextRequest,
        place: PlaceFn,
        dialect: Dialect,
    ) -> Response | None:
        """Return the answer, or None if the client hung up first: then sampling stops and nothing is recorded."""
        answer = asyncio.create_task(self._answer(session, body, place, dialect))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return await answer
            session.client_gone_at = asyncio.get_running_loop().time()
            return None
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _answer(
        self, session: AgentSession, body: ChatRequest | TextRequest, place: PlaceFn, dialect: Dialect
    ) -> Response:
        """Generate within the budget."""
        if session.task.served or body.model in session.task.adapters:
            return await self._answer_unrecorded(session, body, place, dialect)
        if isinstance(body, TextRequest) and body.max_tokens == 0:
            return _written(dialect, await self._score_prompt(session, body, place))
        count = body.n or 1
        with _turn_of(session):
            longest = await session.room(body.longest, count)
            if longest < 1:
                left = f"{session.budget} left for {count} answers"
                raise BadRequest(f"the episode's budget of sampled tokens is used up ({left})", BUDGET_EXHAUSTED)
            with session.reserved(longest * count):
                return await self._generate(session, body, longest, place, dialect)

    async def _score_prompt(self, session: AgentSession, body: TextRequest, place: PlaceFn) -> Reply:
        """Answer a request that samples nothing: it is not recorded, and uses no turn and no token budget."""
        _role_of(body, session.task.roles)
        with _client_errors():
            prompt, _ = await place(session.encoded, body.only_prompt)
        completion = Completion("", (), (), (), StopReason.LENGTH)
        if body.alternatives is not None:
            nothing = replace(session.task.sampling, max_tokens=0, prompt_logprobs=body.alternatives)
            (completion,) = await _sample(session, prompt, nothing, 1)
        answers = [answer_to(self._language, self._parse_tools, completion, body)] * (body.n or 1)
        return Reply(body, answers, len(prompt), await self._echo(body, prompt, completion.prompt_scores))

    async def _answer_unrecorded(
        self, session: AgentSession, body: ChatRequest | TextRequest, place: PlaceFn, dialect: Dialect
    ) -> Response:
        """Answer by an adapter other than the policy's, or by a finished model: no record, and no token budget."""
        task = session.task
        opening = ""
        with _client_errors():
            if task.served and body.model not in ("", task.served):
                raise BadRequest(f"model = {body.model!r:.80} is not served here: {task.served}", "model_not_found")
            if isinstance(body, TextRequest) and body.echo:
                which = "a finished model" if task.served else "an adapter"
                raise BadRequest(f"echo is for prompts of the policy, and model = {body.model!r} is {which}")
            if isinstance(body, ChatRequest):
                opening = opening_for(body, self._parse_tools)
                prompt, images = await place(session.rendered, body.messages, body.offered, opening)
            else:
                prompt, images = await place(session.encoded, body.only_prompt)
            sampling = body.sampling(task.sampling, task.sampling.max_tokens, task.client_sampling)
        if body.model in task.adapters:
            sampling = replace(sampling, adapter=body.model)
        if task.served and isinstance(dialect, ChatCompletions) and is_plain(body):
            number = session.next_number()
            named = f"{task.request_id}/{number}"
            asked = GenerationRequest(named, prompt, replace(sampling, seed=task.seed_of(number)), images)
            answered = in_pieces(task.generate, asked)
            stream = await begun(dialect.live(Reply(body, (), len(prompt)), self._language, answered))
            return StreamingResponse(stream, media_type="text/event-stream")
        completions = await _sample(session, prompt, sampling, body.n or 1, images)
        with _server_errors():
            answers = [answer_to(self._language, self._parse_tools, one, body, opening) for one in completions]
        return _written(dialect, Reply(body, answers, len(prompt)))

    async def _generate(
        self, session: AgentSession, body: ChatRequest | TextRequest, longest: int, place: PlaceFn, dialect: Dialect
    ) -> Response:
        """Generate, write the answer, record what was sampled: in this order, so that no record is without answer."""
        chat, role = isinstance(body, ChatRequest), _role_of(body, session.task.roles)
        with _client_errors():
            async with session.recording:
                if isinstance(body, ChatRequest):
                    opening = opening_for(body, self._parse_tools)
                    placed = await place(session.place_chat, body.messages, body.offered, opening, role)
                else:
                    placed = await place(session.place_text, body.only_prompt, role)
        try:
            with _client_errors():
                sampling = body.sampling(session.task.sampling, longest, session.task.client_sampling)
                require_trainable(body, session.task.client_sampling)
                if isinstance(body, TextRequest):
                    sampling = replace(sampling, prompt_logprobs=body.alternatives)
            prompt = placed.prompt  # what the policy reads; the track grows by the answer
            completions = await _sample(session, prompt, sampling, body.n or 1, placed.track.images)
            with _server_errors():
                answers = [
                    answer_to(self._language, self._parse_tools, one, body, placed.opening) for one in completions
                ]
                echo = await self._echo(body, prompt, completions[0].prompt_scores)
                response = _written(dialect, Reply(body, answers, len(prompt), echo))
                recorded = [(one.completion, cast(Message, one.message) if chat else None) for one in answers]
                async with session.recording:
                    session.commit(placed, recorded)
        except BaseException:
            session.release(placed)
            raise
        return response

    async def _echo(self, body: ChatRequest | TextRequest, prompt: Sequence[int], scored: Scored | None) -> Echo | None:
        """The prompt in an answer; in a thread, because up to 21 tokens are decoded at each place of the prompt."""
        if not isinstance(body, TextRequest) or not body.echo:
            return None
        echo: Echo = await self.in_thread(echo_of, self._language, body, prompt, scored)
        return echo


async def _sample(
    session: AgentSession,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    count: int,
    images: tuple[Image, ...] = (),
) -> Sequence[Completion]:
    task = session.task
    numbers = [session.next_number() for _ in range(count)]
    session.waiting += count
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    task.generate(
                        GenerationRequest(
                            f"{task.request_id}/{number}",
                            prompt,
                            replace(
                                sampling,
                                seed=task.seed_of(number),
                                keep_kv=True,
                                prompt_logprobs=sampling.prompt_logprobs if number == numbers[0] else None,
                            ),
                            images,
                        )
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


async def _in_turn(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do short work on the event loop."""
    return work(*arguments)


@contextmanager
def _turn_of(session: AgentSession) -> Iterator[None]:
    """One of the session's turns, which a request that fails does not use up."""
    if session.turns == session.task.max_turns:
        raise BadRequest(f"the episode's {session.turns} turns (episode.max_turns) are used up", TURNS_EXHAUSTED)
    session.turns += 1
    try:
        yield
    except BaseException:
        session.turns -= 1
        raise


def _role_of(body: ChatRequest | TextRequest, roles: Sequence[str]) -> str:
    """The role that a request names as its model; "" where the policy has one only."""
    if not roles:
        return ""
    if body.model not in roles:
        raise BadRequest(f"model = {body.model!r:.80} is not a role of episode.env.roles: {', '.join(roles)}")
    return body.model


def _under_v1(app: App) -> App:
    """ASGI middleware: what begins with one of the `PREFIXES` is looked for under /v1."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        prefix = next((one for one in PREFIXES if path.startswith(f"{one}/")), None)
        moved = scope if prefix is None else {**scope, "path": f"/v1{path.removeprefix(prefix)}"}
        await app(moved, receive, send)

    return answering


@contextmanager
def _client_errors() -> Iterator[None]:
    """Treat failed lookups and conversions as errors in the client's request."""
    try:
        yield
    except KeyError as error:
        raise BadRequest(f"a part of the request has no field {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise BadRequest(f"a part of the request has the wrong type or size ({error})") from error


@contextmanager
def _server_errors() -> Iterator[None]:
    """Treat failures as errors of the server."""
    try:
        yield
    except ValueError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _disconnected(request: Request) -> None:
    """Return when the client has hung up. The request's body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reason(error: Exception) -> tuple[str, str]:
    """Return why a request is refused: a message for people and a code for programs."""
    if isinstance(error, BadRequest):
        return str(error), error.code
    if isinstance(error, PromptTooLong):
        return str(error), TOO_LONG
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']} (found {first['input']!r:.80})", "invalid_request"
    return f"{type(error).__name__}: {error}", "invalid_request"


class _AsciiJson(JSONResponse):
    """JSON with escapes for all but ASCII: half a character, which somebody else's text may have, can be sent too."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def _written(dialect: Dialect, reply: Reply) -> Response:
    """The whole answer to a request, as it is sent."""
    if reply.request.stream:
        return Response("".join(dialect.stream(reply)), media_type="text/event-stream")
    return _AsciiJson(dialect.whole(reply))


def _refuse(dialect: Dialect, status: int, message: str, code: str) -> Response:
    """Return an error that clients do not retry, because a retry would be recorded as another sample."""
    return _AsciiJson(dialect.error(message, status, code), status, headers={"x-should-retry": "false"})


__all__ = ["AgentTask", "Endpoint"]
