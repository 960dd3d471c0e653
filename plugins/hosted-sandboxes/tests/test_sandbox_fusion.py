"""The adapter of SandboxFusion, against a server of ours that speaks its wire and runs the programs."""

import asyncio
import base64
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from aiohttp import web

from hone.sandboxes.base import Limits, SandboxLost, SandboxRefused
from hone.sandboxes.choice import make_sandboxes
from hone.testing import SandboxContract

LIMITS = Limits(output_kb=1, at_once=2)


async def run_code(request: web.Request) -> web.Response:
    """`POST /run_code` as SandboxFusion documents it."""
    given = await request.json()
    if "break the service" in given["code"]:
        return web.json_response({"status": "SandboxError", "message": "no container", "run_result": None})
    if "http 503" in given["code"]:
        return web.Response(status=503, text="busy")
    if "not json" in given["code"]:
        return web.Response(text="<html>")
    command = {"python": [sys.executable, "-c"], "bash": ["bash", "-c"]}[given["language"]]
    with tempfile.TemporaryDirectory() as folder:
        for path, content in given.get("files", {}).items():
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path).write_bytes(base64.b64decode(content))
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                [*command, given["code"]],
                input=given.get("stdin", ""),
                capture_output=True,
                text=True,
                cwd=folder,
                timeout=given["run_timeout"],
            )
        except subprocess.TimeoutExpired:
            late = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
            return web.json_response({"status": "Failed", "message": "", "run_result": late, "files": {}})
        wanted = {path: Path(folder, path) for path in given.get("fetch_files", [])}
        files = {p: base64.b64encode(f.read_bytes()).decode() for p, f in wanted.items() if f.is_file()}
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    status = "Success" if done.returncode == 0 else "Failed"
    return web.json_response({"status": status, "message": "", "run_result": result, "files": files})


class Fusion:
    """A host of sandboxes, and the service that it asks, on a port of its own."""

    async def start(self):
        app = web.Application()
        app.router.add_post("/run_code", run_code)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    def host(self, limits):
        port = self._runner.addresses[0][1]
        self._host = make_sandboxes("sandbox_fusion", limits, f"http://127.0.0.1:{port}/")
        self.open = self._host.open
        return self._host

    async def close(self):
        await self._host.close()
        await self._runner.cleanup()


class TestSandboxFusion(SandboxContract):
    keeps_files = False

    async def make(self, limits):
        service = Fusion()
        await service.start()
        service.host(limits)
        return service


def with_service(play):
    """Run `play(host)` with a service on a port of its own."""

    async def main():
        service = Fusion()
        await service.start()
        try:
            return await play(service.host(LIMITS))
        finally:
            await service.close()

    return asyncio.run(main())


def test_it_says_what_it_stops():
    async def play(host):
        return await host.start()

    assert "stops" in with_service(play)


@pytest.mark.parametrize(
    ("code", "said"),
    [("break the service", "no container"), ("http 503", "replied 503: busy"), ("not json", "not JSON")],
)
def test_what_the_service_does_is_a_loss(code, said):
    async def play(host):
        with pytest.raises(SandboxLost, match=said):
            await host.open().run(["python", "p.py"], files={"p.py": code.encode()}, timeout_s=30)

    with_service(play)


def test_a_service_that_is_not_there_is_a_loss_and_a_bad_address_is_refused():
    async def play():
        host = make_sandboxes("sandbox_fusion", LIMITS, "http://127.0.0.1:9")
        try:
            with pytest.raises(SandboxLost, match="run_code: ClientConnectorError"):
                await host.open().run(["true"], timeout_s=5)
        finally:
            await host.close()

    asyncio.run(play())
    with pytest.raises(SandboxRefused, match="needs the url of its service"):
        make_sandboxes("sandbox_fusion", LIMITS, "127.0.0.1")
