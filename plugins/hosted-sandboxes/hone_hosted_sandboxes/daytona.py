"""Sandboxes of Daytona (https://www.daytona.io/docs), or of a server of one's own, by HTTP.

    POST   {api}/sandbox                          {"snapshot", "networkBlockAll", "autoStopInterval": minutes,
                                                  "autoDeleteInterval": 0} --> {"id", "state", "toolboxProxyUrl"}
    GET    {api}/sandbox/ID                       until "state" is "started"
    POST   {api}/sandbox/ID/autostop/MINUTES
    DELETE {api}/sandbox/ID
    POST   {toolbox}/ID/files/bulk-upload         a form with files[0].path and files[0].file
    POST   {toolbox}/ID/process/execute           {"command", "timeout": s} --> {"exitCode", "result"}; 408: too late

All requests have the header Authorization: Bearer KEY. A sandbox that nobody uses stops after `autoStopInterval`, and
is then deleted at once. The attendant and the program have one user unless the snapshot's user is root.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from hone.sandboxes.base import Limits, SandboxLost
from hone_hosted_sandboxes.hosted import CREATE_S, GRACE_S, Api, Executed, HostedSandboxes, address, key_found, key_of

URL = "https://app.daytona.io/api"
STATES_S = 0.5  # between two looks at the state of a new sandbox
ENDED = ("error", "build_failed", "destroyed", "destroying", "stopped", "archived")
TOO_LATE = 408


class DaytonaSandboxes(HostedSandboxes):
    """Daytona; `image` is a snapshot."""

    def __init__(self, limits: Limits, url: str, image: str) -> None:
        """Raises SandboxRefused without a key, or for a url that is none."""
        super().__init__(Daytona(address("daytona", url, URL), key_of("daytona"), image, limits), limits)

    @staticmethod
    def configured() -> str:
        """Return whether the service can be asked, without asking it."""
        return key_found("daytona")


class Daytona:
    """Makes machines of Daytona (`hone_hosted_sandboxes.hosted.Service`)."""

    name = "daytona"

    def __init__(self, url: str, key: str, snapshot: str, limits: Limits) -> None:
        self._url = f"{url}/sandbox"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._wanted: dict[str, Any] = {"networkBlockAll": not limits.network, "labels": {"by": "hone"}}
        if snapshot:
            self._wanted["snapshot"] = snapshot
        self._api = Api(self.name, key)

    async def create(self, seconds: float) -> DaytonaMachine:
        body = {**self._wanted, "autoStopInterval": _minutes(seconds), "autoDeleteInterval": 0}
        made = await self._api.ask_json("POST", self._url, json=body, headers=self._headers, timeout_s=CREATE_S)
        if not made.get("id"):
            raise SandboxLost(f"daytona: {self._url} answered without an id")
        machine = DaytonaMachine(self._api, f"{self._url}/{made['id']}", self._headers)
        try:
            await machine.started(made)
        except SandboxLost:
            await machine.remove()
            raise
        return machine

    async def close(self) -> None:
        await self._api.close()


class DaytonaMachine:
    """A sandbox of Daytona (`hone_hosted_sandboxes.hosted.Machine`)."""

    def __init__(self, api: Api, url: str, headers: Mapping[str, str]) -> None:
        self._api, self._url, self._headers = api, url, headers
        self._toolbox = ""

    async def started(self, seen: Mapping[str, Any]) -> None:
        """Wait until the sandbox has started; `seen`: what the service said of it last. Raises SandboxLost."""
        ends = time.monotonic() + CREATE_S
        while seen.get("state") != "started":
            if seen.get("state") in ENDED or time.monotonic() > ends:
                reason = seen.get("errorReason") or "no reason given"
                raise SandboxLost(f"daytona: a new sandbox did not start: its state is {seen.get('state')} ({reason})")
            await asyncio.sleep(STATES_S)  # the API has no request that waits
            seen = await self._api.ask_json("GET", self._url, headers=self._headers)
        proxy = str(seen.get("toolboxProxyUrl") or "")
        if not proxy.startswith(("http://", "https://")):
            raise SandboxLost(f"daytona: a sandbox has no toolboxProxyUrl, found {proxy!r}")
        self._toolbox = f"{proxy.rstrip('/')}/{self._url.rpartition('/')[2]}"

    async def write(self, path: str, content: bytes) -> None:
        form = aiohttp.FormData()
        form.add_field("files[0].path", path)
        form.add_field("files[0].file", content, filename=path, content_type="application/octet-stream")
        await self._api.ask("POST", f"{self._toolbox}/files/bulk-upload", data=form, headers=self._headers)

    async def execute(self, argv: Sequence[str], timeout_s: float) -> Executed:
        url = f"{self._toolbox}/process/execute"
        body = {"command": shlex.join(argv), "timeout": math.ceil(timeout_s)}
        limit_s = timeout_s + GRACE_S
        status, text = await self._api.ask(
            "POST", url, also=(TOO_LATE,), json=body, headers=self._headers, timeout_s=limit_s
        )
        if status == TOO_LATE:
            return Executed(late=True)
        found = await self._api.read_json(text, url)
        code = found.get("exitCode", found.get("code"))
        if not isinstance(code, int):
            raise SandboxLost(f"daytona: {url} answered without an exitCode: {text[:200]!r}")
        return Executed(str(found.get("result") or ""), code)

    async def keep(self, seconds: float) -> None:
        await self._api.ask("POST", f"{self._url}/autostop/{_minutes(seconds)}", headers=self._headers)

    async def remove(self) -> None:
        await self._api.ask("DELETE", self._url, also=(404,), headers=self._headers)


def _minutes(seconds: float) -> int:
    return max(1, math.ceil(seconds / 60))


__all__ = ["Daytona", "DaytonaMachine", "DaytonaSandboxes"]
