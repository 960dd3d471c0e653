"""Sandboxes of a service: SandboxFusion's `POST /run_code` (https://github.com/bytedance/SandboxFusion).

    {"code", "language", "run_timeout", "stdin", "files": {path: base64}, "fetch_files": [path]}
    --> {"status": "Success" | "Failed" | "SandboxError", "message",
         "run_result": {"status": "Finished" | "Error" | "TimeLimitExceeded", "return_code", "stdout", "stderr",
                        "execution_time"}, "files": {path: base64}}

`Failed` is the program's doing: it failed or was too slow. `SandboxError`, an HTTP error and silence are losses. The
service forgets the folder after each run, so hone keeps the files that a sandbox was given and the wanted ones.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from hone.processes.http_client import http_session
from hone.sandboxes.base import PYTHON, Limit, Limits, Ran, SandboxLost, SandboxRefused, check_request, seat, seats

GRACE_S = 30.0  # beyond a program's own deadline: for the service's queue and the network
FAILED = 1  # the status of a program whose service does not give one


class SandboxFusion:
    """A SandboxFusion service (`hone.sandboxes.base.SandboxHost`). It has its own limits of memory and disk."""

    def __init__(self, limits: Limits, url: str, image: str) -> None:
        """`url`: where the service is, such as http://10.0.0.5:8080. Raises SandboxRefused."""
        if image:
            raise SandboxRefused(f"sandbox_fusion has no images to choose from; remove image ({image!r})")
        if not url.startswith(("http://", "https://")):
            raise SandboxRefused(
                f"sandbox_fusion needs the url of its service, such as http://HOST:8080, found {url!r}"
            )
        self._url = url.rstrip("/")
        self._most = limits.output_kb << 10
        self._seats = asyncio.Semaphore(seats(limits))
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> str:
        await self._post({"code": "print(1)", "language": "python", "run_timeout": 10}, 10.0)
        return f"what the service at {self._url} stops"

    def open(self) -> FusionSandbox:
        return FusionSandbox(self)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def run(self, request: Mapping[str, Any], timeout_s: float) -> Ran:
        """Run one request. Raises SandboxLost."""
        async with seat(self._seats):
            return self._ran(await self._post(request, timeout_s))

    async def _post(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._session = self._session or http_session()
        where = f"{self._url}/run_code"
        try:
            async with asyncio.timeout(timeout_s + GRACE_S), self._session.post(where, json=request) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise SandboxLost(f"{where}: {type(error).__name__}: {error}") from error
        if reply.status != 200:
            raise SandboxLost(f"{where} replied {reply.status}: {text[:200]}")
        try:
            body = json.loads(text)
        except ValueError as error:
            raise SandboxLost(f"{where} replied with text that is not JSON: {text[:80]!r}") from error
        status = body.get("status") if isinstance(body, dict) else None
        if status not in ("Success", "Failed") or not isinstance(body.get("run_result"), dict):
            raise SandboxLost(f"{where}: the service failed: {text[:200]}")
        return dict(body)

    def _ran(self, body: Mapping[str, Any]) -> Ran:
        result = body["run_result"]
        limit: Limit = "time" if result.get("status") == "TimeLimitExceeded" else ""
        output = [str(result.get(name) or "").encode() for name in ("stdout", "stderr")]
        if not limit and max(map(len, output)) > self._most:
            limit = "output"
        code = result.get("return_code")
        default = 0 if body["status"] == "Success" else FAILED
        return Ran(
            status=int(code) if code is not None else default,
            stdout=output[0][: self._most],
            stderr=output[1][: self._most],
            seconds=float(result.get("execution_time") or 0.0),
            limit=limit,
            files={path: base64.b64decode(content) for path, content in (body.get("files") or {}).items()},
        )


class FusionSandbox:
    """The files of one sandbox, sent with each run."""

    def __init__(self, service: SandboxFusion) -> None:
        self._service = service
        self._files: dict[str, bytes] = {}

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = {},
        wanted: Sequence[str] = (),
        timeout_s: float,
    ) -> Ran:
        """As `Sandbox.run`. The command line runs in the service's bash; the interpreter is its `python`."""
        check_request(argv, (*files, *wanted))
        self._files.update(files)
        whole = len(argv) == 2 and argv[0] == PYTHON and argv[1] in self._files
        request = {
            "code": self._files[argv[1]].decode("utf-8", "replace") if whole else shlex.join(argv),
            "language": "python" if whole else "bash",
            "run_timeout": timeout_s,
            "stdin": stdin.decode("utf-8", "replace"),
            "files": {path: base64.b64encode(content).decode("ascii") for path, content in self._files.items()},
            "fetch_files": list(wanted),
        }
        ran = await self._service.run(request, timeout_s)
        self._files.update(ran.files)
        return ran

    async def close(self) -> None:
        self._files.clear()


__all__ = ["FusionSandbox", "SandboxFusion"]
