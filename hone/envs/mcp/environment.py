"""Episodes whose tools MCP servers provide. The servers are shared by all episodes of a run.

for_run   starts each server once and lists its tools, so that a wrong command is an error before the first step
episode   starts a server that is not running, within a budget of restarts; an episode whose server dies is
          `env_failed`, and is played again while `episode.env.retries` lasts
close     ends the servers with everything that they started
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hone.config import ConfigError
from hone.envs.base import Start, ToolLost, ToolResult
from hone.envs.mcp.client import McpClient
from hone.envs.settings import EpisodeConfig, McpSettings
from hone.envs.tools import ToolEnv, by_name
from hone.processes.child import END_S
from hone.processes.restarts import Restarts
from hone.types import Prompt

RESTARTS, RESTARTS_S = 5, 120.0
STOPPED_S = 2 * END_S  # by then a server that was checked has ended


class McpTool:
    """One tool of one server (`hone.envs.base.Tool`)."""

    def __init__(self, client: McpClient, spec: Mapping[str, Any], timeout_s: float) -> None:
        self.spec = spec
        self.timeout_s = timeout_s
        self._client = client

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises BadArguments, ToolLost."""
        return await self._client.call(str(self.spec["function"]["name"]), arguments)

    async def check(self) -> None:
        """Raises ToolLost."""
        await self._client.check()


class McpServers:
    """The servers of a run. It creates the environments of its episodes (`hone.envs.base.Shared`)."""

    def __init__(self, settings: McpSettings) -> None:
        """Start each server, list its tools, and end it. Raises ConfigError, with the last lines of its log."""
        self._settings = settings
        self._clients: dict[str, McpClient] = {}
        self._specs: dict[str, list[dict[str, Any]]] = {}
        self._starting = asyncio.Lock()
        self._restarts = {name: Restarts(RESTARTS, RESTARTS_S) for name in settings.servers}
        most_s = sum(one.start_timeout_s + STOPPED_S for one in settings.servers.values())
        with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop, which it would block anyway
            thread.submit(asyncio.run, self._check()).result(most_s)

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> McpEnv:
        return McpEnv(prompt, self, settings)

    async def tools(self) -> list[McpTool]:
        """The tools of one episode; starts servers that do not run. Raises ToolLost."""
        async with self._starting:
            for name in self._settings.servers:
                if name not in self._clients or not self._clients[name].usable:
                    await self._start(name)
        timeout_s = self._settings.tool_timeout_s
        return [McpTool(self._clients[name], spec, timeout_s) for name in self._clients for spec in self._specs[name]]

    async def close(self) -> None:
        clients, self._clients = self._clients, {}
        await asyncio.gather(*(one.close() for one in clients.values()))

    async def _start(self, name: str) -> None:
        restarts = self._restarts[name]
        if name in self._clients:  # it was running
            if not restarts.take():
                raise ToolLost(f"the MCP server {name} ended again and again, and is given up after {restarts}")
            await asyncio.sleep(restarts.pause_s)
            await self._clients[name].close()
        client = self._clients[name] = McpClient(name, self._settings.servers[name])
        self._specs[name] = await client.start()
        restarts.worked()

    async def _check(self) -> None:
        owners: dict[str, str] = {}
        for name, server in self._settings.servers.items():
            where = f"episode.env.servers.{name}"
            client = McpClient(name, server)
            try:
                found = await client.start()
            except ToolLost as error:
                raise ConfigError(f"{where}: {error}") from error
            await client.close()
            for tool in [str(one["function"]["name"]) for one in found]:
                if owners.get(tool) == name:
                    raise ConfigError(f"{where}: it lists the tool {tool} twice, and a call could mean either")
                if tool in owners:
                    raise ConfigError(
                        f"{where}: its tool {tool} exists in the server {owners[tool]} too, and a call could mean "
                        f"either; choose the tools of one of them: servers.{name}.tools"
                    )
                owners[tool] = name
        if not owners:
            raise ConfigError(f"episode.env.servers: no server has a tool ({', '.join(self._settings.servers)})")


class McpEnv(ToolEnv):
    """One episode with the tools of MCP servers."""

    def __init__(self, prompt: Prompt, servers: McpServers, settings: EpisodeConfig) -> None:
        super().__init__(prompt, (), settings.limits)
        self._servers = servers

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> McpServers:  # type: ignore[override]
        """Check the servers that the run file names. Raises ConfigError."""
        assert isinstance(settings.env, McpSettings)
        return McpServers(settings.env)

    async def start(self) -> Start:
        self._tools = by_name(await self._servers.tools())
        return await super().start()


__all__ = ["McpEnv", "McpServers"]
