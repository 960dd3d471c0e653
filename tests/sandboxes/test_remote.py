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


def with_service(play):
    """Run `play(host)` with a service on a port of its own."""

    async def main():
        app = web.Application()
        app.router.add_post("/run_code", run_code)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        host = make_sandboxes("sandbox_fusion", LIMITS, f"http://127.0.0.1:{port}/")
        try:
            return await play(host)
        finally:
            await host.close()
            await runner.cleanup()

    return asyncio.run(main())


def test_programs_files_and_status():
    async def play(host):
        assert "stops" in await host.start()
        sandbox = host.open()
        program = b"import sys; open('o', 'w').write(input() + open('d/i').read()); print(1); sys.exit(3)"
        first = await sandbox.run(
            ["python", "p.py"], stdin=b"a", files={"p.py": program, "d/i": b"b"}, wanted=["o", "none"], timeout_s=30
        )
        second = await sandbox.run(["cat", "o"], timeout_s=30)
        await sandbox.close()
        return first, second

    first, second = with_service(play)
    assert (first.status, first.stdout, first.limit, first.files) == (3, b"1\n", "", {"o": b"ab"})
    assert (second.status, second.stdout) == (0, b"ab")


def test_what_the_program_does_is_a_result():
    async def play(host):
        sandbox = host.open()
        late = await sandbox.run(["sleep", "30"], timeout_s=0.2)
        loud = await sandbox.run(["python", "p.py"], files={"p.py": b"print('x' * 5000)"}, timeout_s=30)
        return late, loud

    late, loud = with_service(play)
    assert (late.limit, late.ok) == ("time", False)
    assert (loud.limit, len(loud.stdout)) == ("output", 1024)


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
