"""One MCP server as hone uses it: the handshake, the list of its tools, and calls.

A call that the server refuses is the policy's to read. A server that is gone, breaks the protocol, or does not answer a
ping after a call that was late, is `ToolLost`.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Mapping
from typing import Any

from hone import __version__
from hone.envs.base import BadArguments, ToolLost, ToolResult
from hone.envs.mcp.transports import HttpTransport, PipeTransport, Rpc, Transport
from hone.envs.settings import McpServer

PROTOCOL = "2025-11-25"  # offered; a server may answer with another of these
PROTOCOLS = ("2024-11-05", "2025-03-26", "2025-06-18", PROTOCOL)
PING_S = 5.0
MOST_PAGES = 100  # of a list of tools
INVALID_PARAMS = -32602
KEPT = (  # of hone's environment; the rest, such as the tokens of trackers and hubs, is none of a server's business
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "NODE_PATH"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
)


class McpClient:
    """A connection to one server, used on one event loop. Constructing it starts nothing."""

    def __init__(self, name: str, settings: McpServer) -> None:
        self.name = name
        self._settings = settings
        self._numbers = itertools.count(1)
        self._transport: Transport | None = None

    @property
    def usable(self) -> bool:
        """Return whether it is connected, as far as is known."""
        return self._transport is not None and not self._transport.lost

    async def start(self) -> list[dict[str, Any]]:
        """Connect; return the specs of the tools that are offered to the policy. Raises ToolLost, with the log."""
        transport = self._transport = _transport(self.name, self._settings)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s) as deadline:
                await transport.open()
                await self._shake_hands(transport)
                return self._chosen(await self._listed())
        except (ToolLost, TimeoutError) as error:
            late = f"no answer within {self._settings.start_timeout_s:g} s" if deadline.expired() else str(error)
            lines = transport.log()
            await self.close()
            raise ToolLost(late + (f"; the last lines of its log:\n{lines}" if lines else "")) from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; the caller has the deadline, and then calls `check`. Raises BadArguments, ToolLost."""
        response = await self._ask("tools/call", {"name": tool, "arguments": dict(arguments)})
        if (error := response.get("error")) is not None:
            text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
            if isinstance(error, dict) and error.get("code") == INVALID_PARAMS:
                raise BadArguments(text)
            return ToolResult(f"error: {text}", failed=True)
        result = response.get("result")
        if not isinstance(result, dict) or not isinstance(result.get("content"), list):
            raise ToolLost(f"the MCP server {self.name} answered tools/call without content")
        failed = bool(result.get("isError"))
        text = "\n".join(_text_of(one) for one in result["content"])
        return ToolResult(f"error: {text}" if failed else text, failed=failed)

    async def close(self) -> None:
        """Disconnect, and end the server if it was started here."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def _shake_hands(self, transport: Transport) -> None:
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "hone", "version": __version__},
        }
        result = self._result(await self._ask("initialize", hello), "initialize")
        if result.get("protocolVersion") not in PROTOCOLS:
            raise ToolLost(
                f"the MCP server {self.name} speaks protocol {result.get('protocolVersion')!r:.40}; hone speaks "
                f"{', '.join(PROTOCOLS)}"
            )
        await transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: Any = None
        for _ in range(MOST_PAGES):
            page = self._result(await self._ask("tools/list", {"cursor": cursor} if cursor else {}), "tools/list")
            listed = page.get("tools")
            if not isinstance(listed, list):
                raise ToolLost(f"the MCP server {self.name} answered tools/list without a list of tools")
            found += [self._spec(one) for one in listed]
            cursor = page.get("nextCursor")
            if not cursor:
                return found
        raise ToolLost(f"the MCP server {self.name} lists more than {MOST_PAGES} pages of tools")

    def _spec(self, tool: Any) -> dict[str, Any]:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"].strip():
            raise ToolLost(f"the MCP server {self.name} lists a tool without a name: {tool!r:.100}")
        schema, described = tool.get("inputSchema") or {"type": "object"}, tool.get("description") or ""
        for key, value, kind in (("inputSchema", schema, dict), ("description", described, str)):
            if not isinstance(value, kind):
                expected = "an object" if kind is dict else "text"
                raise ToolLost(
                    f"the MCP server {self.name} lists {key} {value!r:.100} of the tool {tool['name']!r:.100}; "
                    f"expected {expected}"
                )
        function = {"name": tool["name"], "description": described, "parameters": schema}
        return {"type": "function", "function": function}

    def _chosen(self, specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        wanted = self._settings.tools
        names = [one["function"]["name"] for one in specs]
        missing = [one for one in wanted or () if one not in names]
        if missing:
            raise ToolLost(f"the MCP server {self.name} has no tool {missing[0]!r} (it has: {', '.join(names)})")
        return specs if wanted is None else [one for one in specs if one["function"]["name"] in wanted]

    async def check(self) -> None:
        """Ask for a sign of life after a late call. Raises ToolLost, and ends the connection, if there is none.

        So it does if the server wrote an answer that cannot be read: the call was not slow.
        """
        try:
            async with asyncio.timeout(PING_S):
                await self._ask("ping", {})
        except TimeoutError as error:
            await self.close()
            raise ToolLost(
                f"the MCP server {self.name} did not answer a ping within {PING_S:g} s, after a call that was late"
            ) from error
        if self._transport is not None and (line := self._transport.broken):
            await self.close()
            raise ToolLost(f"the MCP server {self.name} wrote a line that is no JSON, instead of an answer: {line}")

    async def _ask(self, method: str, params: Mapping[str, Any]) -> Rpc:
        if self._transport is None:
            raise ToolLost(f"the MCP server {self.name} was ended")
        number = next(self._numbers)
        return await self._transport.request({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})

    def _result(self, response: Rpc, method: str) -> dict[str, Any]:
        result = response.get("result")
        if not isinstance(result, dict):
            raise ToolLost(f"the MCP server {self.name} refused {method}: {response.get('error', response)!r:.300}")
        return result


def _transport(name: str, settings: McpServer) -> Transport:
    if settings.url is not None:
        return HttpTransport(name, settings.url, settings.headers)
    assert settings.command  # checked by the settings
    program, *arguments = settings.command
    command = [sys.executable if program == "python" else program, *arguments]
    return PipeTransport(f"mcp {name}", command, settings.environment, kept=KEPT)


def _text_of(part: Any) -> str:
    """Return the text of one part of a result, or the kind of data that it has instead."""
    if not isinstance(part, dict):
        return str(part)
    if isinstance(part.get("text"), str):
        return str(part["text"])
    resource = part.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    return f"[{part.get('type', 'data')} {part.get('uri') or part.get('mimeType') or ''}".rstrip() + "]"


__all__ = ["McpClient"]
