"""Episodes with a resources server of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym), by HTTP.

    POST /seed_session   the row                       the server's cookie is the session of the episode
    POST /<tool>         the arguments of a call       what it answers is the output of the call, also an error
    POST /verify         the row and the response      {"reward": 1.0, "mask_sample": false, ...}

The episode is the loop of NeMo Gym's simple agent, on OpenAI's Responses: ask the policy, call the tools that it names,
until it names none or a limit is reached; then the server verifies all items. The policy is asked through the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from hone.config import ConfigError
from hone.data.rendering import Renderer
from hone.envs.agents.endpoint import BUDGET_EXHAUSTED, TOO_LONG, TURNS_EXHAUSTED
from hone.envs.agents.program import Verdict
from hone.envs.agents.runner import AgentRunner
from hone.envs.base import ToolLost
from hone.envs.episode import Play, ScoreFn
from hone.envs.settings import EpisodeConfig
from hone.processes.http_client import http_session
from hone.processes.untrusted_json import parse_json, parse_json_apart
from hone.types import Prompt, TrajectoryGroup
from hone_environments.settings import NemoGymSettings

LARGEST_ANSWER = 16 << 20  # bytes
PING_S = 5.0
ASKED = "responses_create_params"  # the column with what the policy is asked
OF_THE_POLICY = (
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
)  # its keys that are sent, with the input
LENGTHS = (BUDGET_EXHAUSTED, TURNS_EXHAUSTED, TOO_LONG)
Json = dict[str, Any]


class Refused(RuntimeError):
    """The endpoint refused a request; `status_code` tells `AgentRunner` that the length of the policy may be why."""

    def __init__(self, status_code: int, text: str, code: str) -> None:
        super().__init__(text)
        self.status_code = status_code
        self.code = code


class Resources:
    """A session of the resources server: one episode."""

    def __init__(self, settings: NemoGymSettings, http: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._url = settings.url.rstrip("/")
        self._http = http

    async def ask(self, route: str, body: Mapping[str, Any]) -> Json:
        """Ask the server itself. Raises ToolLost if it answers with an error, late, or not at all."""
        limit_s = self._settings.verify_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                status, text = await self._post(route, body)
        except TimeoutError as error:
            raise self._lost(f"did not answer /{route} within {limit_s:g} s") from error
        if status >= 400:
            raise self._lost(f"answered /{route} with status {status}: {text[:300]}")
        try:
            found = await parse_json_apart(text)
        except ValueError as error:
            raise self._lost(f"answered /{route} with something else than JSON: {error}") from error
        if not isinstance(found, dict):
            raise self._lost(f"answered /{route} with {text[:100]}, expected an object")
        return found

    async def call(self, tool: str, arguments: str) -> str:
        """The output of a tool call, for the policy to read. Raises ToolLost if the server is gone."""
        try:
            given = parse_json(arguments)
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error}"})
        limit_s = self._settings.tool_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                _, text = await self._post(tool, given)
                return text
        except TimeoutError:
            await self.ping()
            return json.dumps({"error": f"{tool} did not answer within {limit_s:g} s"})

    async def ping(self) -> None:
        """Wait for any answer of the server. Raises ToolLost if there is none."""
        try:
            async with asyncio.timeout(PING_S), self._http.get(self._url):
                pass
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._lost(f"cannot be reached: {type(error).__name__}: {error}") from error

    async def _post(self, route: str, body: Any) -> tuple[int, str]:
        try:
            async with self._http.post(f"{self._url}/{route}", json=body, headers=self._settings.headers) as answer:
                held = bytearray()
                async for piece in answer.content.iter_any():
                    held += piece
                    if len(held) > LARGEST_ANSWER:
                        raise self._lost(f"answered /{route} with more than {LARGEST_ANSWER:,} bytes")
                return answer.status, held.decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._lost(f"is lost: {type(error).__name__}: {error}") from error

    def _lost(self, what: str) -> ToolLost:
        return ToolLost(f"the NeMo Gym server at {self._url} {what}")


class SimpleAgent:
    """Plays one episode (`hone.envs.agents.program.AgentProgram`)."""

    def __init__(self, settings: NemoGymSettings) -> None:
        """Look for the server. Raises ConfigError."""
        self._settings = settings
        with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop, which it would block anyway
            thread.submit(asyncio.run, self._check()).result(2 * PING_S)

    async def __call__(self, base_url: str, api_key: str, prompt: Prompt) -> Verdict:
        """Seed, ask and call tools in turn, verify. Raises ToolLost, Refused."""
        row = {key: value for key, value in prompt.row.items() if "." not in key}  # those are parts of other columns
        async with self._connected() as http:
            server = Resources(self._settings, http)
            await server.ask("seed_session", row)
            response = await self._answered(http, server, f"{base_url}/responses", row[ASKED])
            return verdict_of(await server.ask("verify", {**row, "response": response}), self._settings.url)

    async def _answered(self, http: aiohttp.ClientSession, server: Resources, url: str, asked: Json) -> Json:
        """The last response of the policy, with the items of all of them and the outputs of the calls."""
        given = asked["input"]
        start = [{"role": "user", "content": given}] if isinstance(given, str) else given
        fixed = {key: asked[key] for key in OF_THE_POLICY if asked.get(key) is not None}
        tools = {one.get("name") for one in asked.get("tools") or ()}
        items: list[Json] = []
        response: Json = {}
        while True:
            try:
                response = await _response(http, url, {**fixed, "model": "policy", "input": start + items})
            except Refused as refusal:
                if not items or refusal.code not in LENGTHS:
                    raise
                break
            items += response["output"]
            calls = [one for one in response["output"] if one["type"] == "function_call"]
            if not calls or response.get("incomplete_details"):
                break
            for call in calls:
                known = call["name"] in tools  # another name could be a route of the server itself, such as verify
                output = await server.call(call["name"], call["arguments"]) if known else _unknown(call["name"], tools)
                output = output[: self._settings.max_output_characters]
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
        return {**response, "output": items}

    def _connected(self) -> aiohttp.ClientSession:
        """HTTP with cookies of its own, also from a server without a name; the deadlines are the callers'."""
        return http_session(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def _check(self) -> None:
        async with self._connected() as http:
            try:
                await Resources(self._settings, http).ping()
            except ToolLost as error:
                raise ConfigError(f"episode.env.url: {error}") from error


class NemoGymRunner(AgentRunner):
    """Runs groups of episodes with a resources server."""

    def __init__(self, config: EpisodeConfig, settings: NemoGymSettings, renderer: Renderer) -> None:
        super().__init__(config, settings, renderer, SimpleAgent(settings))

    async def run(self, prompts: Sequence[Prompt], play: Play, score: ScoreFn) -> list[TrajectoryGroup]:
        """Return the groups of `prompts`. Raises ConfigError for a prompt that is no row of NeMo Gym."""
        for one in prompts:
            asked = one.row.get(ASKED)
            if not isinstance(asked, Mapping) or not isinstance(asked.get("input"), str | list):
                raise ConfigError(
                    f"{one.prompt_id}: the row should have a column {ASKED} with an input, as the data of NeMo Gym has"
                )
        return await super().run(prompts, play, score)


async def _response(http: aiohttp.ClientSession, url: str, body: Json) -> Json:
    """Ask the policy. Raises Refused."""
    async with http.post(url, json=body) as answer:
        found: Json = await answer.json()
        if answer.status >= 400:
            error = found["error"]
            raise Refused(answer.status, str(error["message"]), str(error.get("code")))
        return found


def _unknown(name: str, tools: set[Any]) -> str:
    return json.dumps({"error": f"there is no tool {name} (there is: {', '.join(sorted(map(str, tools)))})"})


def verdict_of(verified: Mapping[str, Any], url: str) -> Verdict:
    """Return the server's verdict on an episode. Raises ToolLost if the reward measures nothing (`mask_sample`)."""
    where = f"the NeMo Gym server at {url}"
    if verified.get("mask_sample"):
        why = verified.get("failure_reason") or "no reason given"
        raise ToolLost(f"{where} could not verify: {verified.get('failure_kind') or 'mask_sample'}: {why}")
    parts = verified.get("reward_components")
    figures = {f"nemo_gym/reward/{key}": value for key, value in parts.items()} if isinstance(parts, dict) else {}
    for name, value in {"reward": verified.get("reward"), **figures}.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ToolLost(f"{where} verified with {name} = {value!r:.40}, expected a finite number")
    return Verdict(reward=float(verified["reward"]), metrics={key: float(value) for key, value in figures.items()})


__all__ = ["NemoGymRunner", "Refused", "SimpleAgent", "verdict_of"]
