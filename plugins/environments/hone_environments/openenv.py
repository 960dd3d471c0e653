"""Episodes in environments of OpenEnv servers (https://github.com/meta-pytorch/OpenEnv), by WebSocket.

    hone --{"type": "reset", "data": {"seed": 1}}-->  server --{"type": "observation", "data": {"observation": {...},
    hone --{"type": "step", "data": {...action}}-->          "reward": 0.5, "done": false}}--> hone
    hone --{"type": "close"}-->                              or {"type": "error", "data": {"code": ..., "message": ...}}

A connection is one session of the server, with an environment of its own, and serves one episode. An action that the
server finds invalid is the policy's to read. A server that is gone, breaks the protocol, or whose environment raises,
is `ToolLost`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from hone.config import ConfigError
from hone.deadline import SeatWait
from hone.envs.base import Start, StepResult, ToolLost
from hone.envs.gym_class import opening, seed_of
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.processes.http_client import http_session
from hone.processes.untrusted_json import parse_json, parse_json_apart
from hone.types import Completion, Message, Prompt, Status
from hone_environments.settings import OpenEnvSettings
from hone_environments.text_actions import Refusals

LARGEST_MESSAGE = 16 << 20  # bytes
PING_S = 5.0  # how long a server may take to answer a ping after a step that was late
CLOSE_S = 2.0  # how long a server may take to end a session
INVALID_ACTION = "VALIDATION_ERROR"
FENCE = "```"


class Refused(Exception):
    """The server answered with an error. Its text is the server's."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Observed:
    """Answer of an environment to `reset` or `step`."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Session:
    """One session of a server: a connection on which hone asks and the server answers, in turn."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        self._where = f"the OpenEnv server at {settings.url}"
        self._settings = settings
        self._open = AsyncExitStack()
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, seed: int) -> Observed:
        """Connect and start an episode. Raises ToolLost."""
        limit_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._connect()
                return await self._observed("reset", {**self._settings.reset, "seed": seed})
        except TimeoutError as error:
            raise ToolLost(f"{self._where} did not answer reset within {limit_s:g} s") from error
        except Refused as error:
            hint = ""
            if error.code == "CAPACITY_REACHED":
                hint = "; set episode.env.max_sessions to what it allows, or raise its max_concurrent_envs"
            raise ToolLost(f"{self._where} refused reset: {error.code}: {error}{hint}") from error

    async def step(self, action: Mapping[str, Any]) -> Observed | None:
        """Take an action; None if the environment is late, but the server lives. Raises Refused, ToolLost."""
        try:
            async with asyncio.timeout(self._settings.step_timeout_s):
                return await self._observed("step", action)
        except TimeoutError:
            await self._ping()
            return None
        except Refused as error:
            if error.code == INVALID_ACTION:
                raise
            raise ToolLost(f"{self._where} failed in step: {error.code}: {error}") from error

    async def close(self) -> None:
        """End the session, and wait for a short time until the server has ended it."""
        with suppress(TimeoutError, OSError, aiohttp.ClientError):
            async with asyncio.timeout(CLOSE_S), self._open:
                if self._socket is not None and not self._socket.closed:
                    await self._socket.send_str(json.dumps({"type": "close"}))
                    async for _ in self._socket:  # an answer that was late, until the server ends the connection
                        pass

    async def _connect(self) -> None:
        session = await self._open.enter_async_context(http_session(headers=self._settings.headers))
        try:
            url = self._settings.url
            self._socket = await session.ws_connect(url, autoping=False, max_msg_size=LARGEST_MESSAGE)
        except (aiohttp.ClientError, OSError) as error:
            raise ToolLost(f"{self._where} cannot be reached: {type(error).__name__}: {error}") from error
        self._open.push_async_callback(self._socket.close)

    async def _observed(self, kind: str, data: Mapping[str, Any]) -> Observed:
        assert self._socket is not None
        with suppress(OSError, aiohttp.ClientError):  # then the connection is closed, and what was received says why
            await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
        text = await self._text(kind)
        try:
            return observed(await parse_json_apart(text))
        except ValueError as error:
            raise ToolLost(f"{self._where} answered {kind} with something else: {error}") from error

    async def _text(self, kind: str) -> str:
        """The next message of the server. Raises ToolLost if there is none."""
        assert self._socket is not None
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                return str(message.data)
            if message.type is aiohttp.WSMsgType.PING:
                await self._socket.pong(message.data)
            elif message.type is not aiohttp.WSMsgType.PONG:
                how = f"{message.data}" if message.type is aiohttp.WSMsgType.ERROR else f"({message.type.name})"
                raise ToolLost(f"{self._where} ended the connection in {kind}: {how}")

    async def _ping(self) -> None:
        """Wait for a sign of life. Raises ToolLost if there is none."""
        assert self._socket is not None
        late = f"did not answer step within {self._settings.step_timeout_s:g} s"
        try:
            async with asyncio.timeout(PING_S):
                await self._socket.ping()
                found = (await self._socket.receive()).type
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise ToolLost(f"{self._where} {late}, nor a ping within {PING_S:g} s") from error
        if found not in (aiohttp.WSMsgType.PONG, aiohttp.WSMsgType.PING, aiohttp.WSMsgType.TEXT):
            raise ToolLost(f"{self._where} {late}, and ended the connection")


class OpenEnv:
    """One episode in a session of an OpenEnv server."""

    def __init__(self, prompt: Prompt, settings: OpenEnvSettings, seats: asyncio.Semaphore | None) -> None:
        self._prompt = prompt
        self._settings = settings
        self._seats = seats or nullcontext()
        self._session = Session(settings)
        self._refusals = Refusals(settings.max_bad_calls)
        self._holding = AsyncExitStack()  # a seat

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> OpenEnvs:
        """Start one episode, to see that the server answers. Raises ConfigError."""
        assert isinstance(settings.env, OpenEnvSettings)
        return OpenEnvs(settings.env)

    async def start(self) -> Start:
        with SeatWait():  # the clock of the episode stands still
            await self._holding.enter_async_context(self._seats)
        text = shown(await self._session.reset(seed_of(self._prompt)), self._settings)
        return Start(messages=opening(self._prompt, text), anchor=text)

    async def step(self, said: Said, completion: Completion) -> StepResult:
        try:
            action = action_in(said.content, self._settings.action_field)
        except ValueError as error:
            return self._refusals.refuse(said.content, f"This is no action: {error}.")
        try:
            found = await self._session.step(action)
        except Refused as error:
            return self._refusals.refuse(said.content, f"The environment refused this action: {error}.")
        if found is None:
            late = f"the environment did not answer this action within {self._settings.step_timeout_s:g} s"
            return StepResult(done=False, status=Status.TRUNCATED, error=late, answer=said.content)
        text = shown(found, self._settings)
        messages = (Message(role="user", content=text),)
        return StepResult(found.done, messages, reward=found.reward, anchor=text, answer=said.content)

    async def close(self) -> None:
        async with self._holding:
            await self._session.close()


class OpenEnvs:
    """Creates the environments of a run's episodes (`hone.envs.base.Shared`)."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        self._settings = settings
        self._seats = asyncio.Semaphore(settings.max_sessions) if settings.max_sessions is not None else None
        with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop, which it would block anyway
            thread.submit(asyncio.run, self._check()).result(settings.start_timeout_s + 3 * CLOSE_S)

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> OpenEnv:
        return OpenEnv(prompt, self._settings, self._seats)

    async def close(self) -> None:
        return None

    async def _check(self) -> None:
        session = Session(self._settings)
        try:
            shown(await session.reset(0), self._settings)
        except ToolLost as error:
            raise ConfigError(f"episode.env: {error}") from error
        finally:
            await session.close()


def action_in(answer: str, field: str | None) -> dict[str, Any]:
    """The action that an answer states: the whole text in `field`, or else a JSON object, which may be fenced.

    Raises ValueError, for the policy to read.
    """
    if field is not None:
        return {field: answer}
    _, opened, after = answer.partition(FENCE)
    fenced, closed, _ = after.partition(FENCE)
    try:
        action = parse_json(fenced.removeprefix("json") if opened and closed else answer)
    except ValueError as error:
        raise ValueError(f"expected one JSON object with the fields of an action ({error})") from error
    if not isinstance(action, dict):
        raise ValueError(f"expected one JSON object with the fields of an action, found {json.dumps(action)[:100]}")
    return action


def observed(message: Any) -> Observed:
    """Read an answer to `reset` or `step`. Raises Refused for an error of the server, ValueError for anything else."""
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise ValueError(f"expected an object with type and data, found {json.dumps(message)[:100]}")
    if message.get("type") == "error":
        raise Refused(str(data.get("code", "no code")), _reasons(data))
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    if message.get("type") != "observation" or not isinstance(observation, dict):
        raise ValueError(f"expected an observation, found {json.dumps(message)[:100]}")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise ValueError(f"reward should be a finite number or null, found {reward!r:.40}")
    if not isinstance(done, bool):
        raise ValueError(f"done should be true or false, found {done!r:.40}")
    return Observed(observation, None if reward is None else float(reward), done)


def shown(found: Observed, settings: OpenEnvSettings) -> str:
    """Return the text of an observation: the field that the settings name, or else all of it, as JSON."""
    name = settings.observation_field
    if name is not None and name not in found.observation:
        raise ToolLost(
            f"episode.env.observation_field: the observation has no field {name!r} (it has: "
            f"{', '.join(found.observation)})"
        )
    value = found.observation if name is None else found.observation[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reasons(data: Mapping[str, Any]) -> str:
    """The reasons in the server's error: pydantic's list, or the message."""
    listed = data.get("errors")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        return str(data.get("message", "no message"))[:500]
    reasons = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in listed[:4]]
    return "; ".join(reasons)[:500]


__all__ = ["OpenEnv", "OpenEnvs", "Session", "action_in", "observed"]
