"""Sandboxes of E2B (https://e2b.dev/docs/api-reference), or of a service that speaks its API, by HTTP.

    POST   {api}/sandboxes                  {"templateID", "timeout": s, "allow_internet_access", "metadata"}
                                            --> {"sandboxID", "envdAccessToken", "domain"}      header X-API-Key
    POST   {api}/sandboxes/ID/timeout       {"timeout": s}
    DELETE {api}/sandboxes/ID
    POST   {envd}/files?path=&username=     the file, as a form                                 header X-Access-Token
    POST   {envd}/process.Process/Start     {"process": {"cmd", "args"}} --> events             Connect, with JSON

envd runs in each sandbox, at https://49983-ID.DOMAIN. If the API's host is not called api.DOMAIN, envd is expected at
the API's own address; the headers E2b-Sandbox-Id and E2b-Sandbox-Port name the sandbox. hone executes as root, so that
its attendant and the program have different users.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp

from hone.sandboxes.base import Limits, SandboxLost
from hone_hosted_sandboxes.hosted import GRACE_S, Api, Executed, HostedSandboxes, address, key_found, key_of

URL, TEMPLATE = "https://api.e2b.app", "base"
PORT = "49983"  # of envd
USER = "root"
ENVELOPE = struct.Struct(">BI")  # flags, length; then a JSON text
COMPRESSED, LAST = 1, 2  # flags


class E2bSandboxes(HostedSandboxes):
    """E2B; `image` is a template."""

    def __init__(self, limits: Limits, url: str, image: str) -> None:
        """Raises SandboxRefused without a key, or for a url that is none."""
        super().__init__(E2b(address("e2b", url, URL), key_of("e2b"), image or TEMPLATE, limits), limits)

    @staticmethod
    def configured() -> str:
        """Return whether the service can be asked, without asking it."""
        return key_found("e2b")


class E2b:
    """Makes machines of E2B (`hone_hosted_sandboxes.hosted.Service`)."""

    name = "e2b"

    def __init__(self, url: str, key: str, template: str, limits: Limits) -> None:
        self._url = url
        self._key = {"X-API-Key": key}
        self._wanted = {"templateID": template, "allow_internet_access": limits.network, "metadata": {"by": "hone"}}
        self._api = Api(self.name, key)

    async def create(self, seconds: float) -> E2bMachine:
        body = {**self._wanted, "timeout": math.ceil(seconds)}
        made = await self._api.ask_json("POST", f"{self._url}/sandboxes", json=body, headers=self._key)
        name = str(made.get("sandboxID") or "")
        if not name:
            raise SandboxLost(f"e2b: {self._url}/sandboxes answered without a sandboxID")
        headers = {"E2b-Sandbox-Id": name, "E2b-Sandbox-Port": PORT}
        if token := made.get("envdAccessToken"):
            headers["X-Access-Token"] = str(token)
        envd = self._envd(name, str(made.get("domain") or ""))
        return E2bMachine(self._api, f"{self._url}/sandboxes/{name}", self._key, envd, headers)

    def _envd(self, name: str, domain: str) -> str:
        scheme, _, host = self._url.partition("://")
        if not domain and not host.startswith("api."):
            return self._url
        return f"{scheme}://{PORT}-{name}.{domain or host.removeprefix('api.')}"

    async def close(self) -> None:
        await self._api.close()


class E2bMachine:
    """A sandbox of E2B (`hone_hosted_sandboxes.hosted.Machine`)."""

    def __init__(self, api: Api, url: str, key: dict[str, str], envd: str, headers: dict[str, str]) -> None:
        self._api, self._url, self._key = api, url, key
        self._envd, self._headers = envd, headers

    async def write(self, path: str, content: bytes) -> None:
        form = aiohttp.FormData()
        form.add_field("file", content, filename=path, content_type="application/octet-stream")
        where = {"path": path, "username": USER}
        await self._api.ask("POST", f"{self._envd}/files", params=where, data=form, headers=self._headers)

    async def execute(self, argv: Sequence[str], timeout_s: float) -> Executed:
        message = json.dumps({"process": {"cmd": argv[0], "args": list(argv[1:])}, "stdin": False}).encode()
        headers = {
            **self._headers,
            "Authorization": "Basic " + base64.b64encode(f"{USER}:".encode()).decode(),
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(math.ceil(timeout_s * 1000)),
        }
        url = f"{self._envd}/process.Process/Start"
        data = ENVELOPE.pack(0, len(message)) + message
        _, body = await self._api.ask("POST", url, data=data, headers=headers, timeout_s=timeout_s + GRACE_S)
        try:
            return executed(body)
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            raise SandboxLost(f"e2b: {url} answered with something else than events: {error!r}") from error

    async def keep(self, seconds: float) -> None:
        await self._api.ask("POST", f"{self._url}/timeout", json={"timeout": math.ceil(seconds)}, headers=self._key)

    async def remove(self) -> None:
        await self._api.ask("DELETE", self._url, also=(404,), headers=self._key)


def executed(body: bytes) -> Executed:
    """Return the result in the events of a process. Raises SandboxLost if it was not the program that ended them."""
    output, end = bytearray(), None
    for flags, message in _envelopes(body):
        if flags & LAST:
            error = message.get("error") or {}
            if error.get("code") == "deadline_exceeded":
                return Executed(late=True)
            if error:
                raise SandboxLost(f"e2b: the process was lost: {error.get('code')}: {str(error.get('message'))[:300]}")
            break
        event = message["event"]
        output += base64.b64decode(event.get("data", {}).get("stdout", ""))
        end = event.get("end", end)
    if end is None:
        raise SandboxLost("e2b: the connection ended before the process")
    return Executed(output.decode("utf-8", "replace"), int(end.get("exitCode", 0)))  # JSON of protobuf leaves out 0


def _envelopes(body: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    at = 0
    while at < len(body):
        flags, length = ENVELOPE.unpack_from(body, at)
        at += ENVELOPE.size
        if flags & COMPRESSED or at + length > len(body):
            raise SandboxLost("e2b: the events are compressed, or cut off")
        yield flags, json.loads(body[at : at + length])
        at += length


__all__ = ["E2b", "E2bMachine", "E2bSandboxes", "executed"]
