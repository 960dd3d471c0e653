"""A server that speaks the wires of E2B and Daytona as their services document them, and runs the programs here.

A machine is a folder with its processes. It ends when it is removed, or at the end of the life that it was given.
"""

import asyncio
import base64
import contextlib
import json
import math
import os
import shutil
import signal
import struct
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field

from aiohttp import web

KEY = "key-of-the-tests"
TOKEN = "token-of-one-sandbox"
LATE = "late"


@dataclass(eq=False)
class Machine:
    """A folder in which commands run as real processes."""

    name: str
    wanted: dict
    life_s: float = 0.0
    lives: list[float] = field(default_factory=list)
    processes: set = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="hone-machine-", dir="/tmp")
        os.chmod(self.folder, 0o755)  # a program of another user passes through
        os.mkdir(f"{self.folder}/bin")
        os.symlink(sys.executable, f"{self.folder}/bin/python3")

    def write(self, path: str, content: bytes) -> None:
        with open(self.inside(path), "wb") as file:
            file.write(content)

    def inside(self, word: str) -> str:
        return word.replace("/tmp/", f"{self.folder}/", 1) if word.startswith("/tmp/") else word

    async def execute(self, argv: list[str], timeout_s: float) -> tuple[bytes, bytes, int] | str:
        variables = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "TMPDIR": self.folder}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *map(self.inside, argv), stdout=pipe, stderr=pipe, env=variables, start_new_session=True
            )
        except FileNotFoundError:
            return b"", b"not found", 127
        self.processes.add(process)
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            return LATE
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            self.processes.discard(process)
        return out, err, process.returncode

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Services:
    """Both services on one port. `answers[route]`: what the next requests get instead, an HTTP status or a function."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.removed: list[Machine] = []
        self.answers: dict[str, deque] = {}
        self.ended = asyncio.Event()  # some machine's life was over
        app = web.Application(client_max_size=1 << 28, middlewares=[self._planned])
        app.add_routes(
            [
                web.post("/sandboxes", self.e2b_create),
                web.post("/sandboxes/{id}/timeout", self.e2b_timeout),
                web.delete("/sandboxes/{id}", self.remove),
                web.post("/files", self.e2b_write),
                web.post("/process.Process/Start", self.e2b_start),
                web.post("/api/sandbox", self.daytona_create),
                web.get("/api/sandbox/{id}", self.daytona_state),
                web.post("/api/sandbox/{id}/autostop/{minutes}", self.daytona_autostop),
                web.delete("/api/sandbox/{id}", self.remove),
                web.post("/toolbox/{id}/files/bulk-upload", self.daytona_write),
                web.post("/toolbox/{id}/process/execute", self.daytona_execute),
            ]
        )
        self._runner = web.AppRunner(app)

    async def start(self) -> int:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self.port

    async def close(self) -> None:
        for machine in tuple(self.machines.values()):
            machine.end()
        await self._runner.cleanup()

    @web.middleware
    async def _planned(self, request, handler):
        route = request.match_info.route.resource.canonical
        planned = self.answers.get(f"{request.method} {route}")
        if planned and (answer := planned.popleft()):
            if callable(answer):
                return answer(request)
            return web.Response(status=answer, text=f"planned; you sent {dict(request.headers)}")
        allowed = {
            "/sandboxes": request.headers.get("X-API-Key") == KEY,
            "/files": request.headers.get("X-Access-Token") == TOKEN,
            "/process": request.headers.get("X-Access-Token") == TOKEN,
            "/api": request.headers.get("Authorization") == f"Bearer {KEY}",
            "/toolbox": request.headers.get("Authorization") == f"Bearer {KEY}",
        }
        if not next(right for start, right in allowed.items() if route.startswith(start)):
            return web.json_response({"code": 401, "message": "wrong key"}, status=401)
        return await handler(request)

    def _new(self, wanted: dict, life_s: float) -> Machine:
        machine = Machine(f"m{len(self.machines) + len(self.removed)}", wanted)
        self.machines[machine.name] = machine
        self._live(machine, life_s)
        return machine

    def _live(self, machine: Machine, life_s: float) -> None:
        machine.lives.append(life_s)
        asyncio.get_running_loop().call_later(life_s, self._over, machine, len(machine.lives))

    def _over(self, machine: Machine, count: int) -> None:
        if machine.name in self.machines and len(machine.lives) == count:
            self._end(machine)
            self.ended.set()

    def _end(self, machine: Machine) -> None:
        machine.end()
        self.removed.append(self.machines.pop(machine.name))

    async def remove(self, request):
        if (machine := self.machines.get(request.match_info["id"])) is None:
            return web.Response(status=404)
        self._end(machine)
        return web.Response(status=204)

    # --- E2B

    async def e2b_create(self, request):
        wanted = await request.json()
        machine = self._new(wanted, wanted["timeout"])
        reply = {"templateID": wanted["templateID"], "sandboxID": machine.name, "clientID": "c", "envdVersion": "0.4.0"}
        return web.json_response({**reply, "envdAccessToken": TOKEN}, status=201)

    async def e2b_timeout(self, request):
        self._live(self.machines[request.match_info["id"]], (await request.json())["timeout"])
        return web.Response(status=204)

    def _named(self, request) -> Machine:
        assert request.headers["E2b-Sandbox-Port"] == "49983"
        return self.machines[request.headers["E2b-Sandbox-Id"]]

    async def e2b_write(self, request):
        form = await request.post()
        assert request.query["username"] == "root"
        self._named(request).write(request.query["path"], form["file"].file.read())
        return web.json_response([{"path": request.query["path"], "name": "x", "type": "file"}])

    async def e2b_start(self, request):
        body = await request.read()
        flags, length = struct.unpack_from(">BI", body)
        assert (flags, length, request.headers["Connect-Protocol-Version"]) == (0, len(body) - 5, "1")
        assert base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")) == b"root:"
        process = json.loads(body[5:])["process"]
        limit_s = int(request.headers["Connect-Timeout-Ms"]) / 1000
        done = await self._named(request).execute([process["cmd"], *process["args"]], limit_s)
        if done == LATE:
            return events({"event": {"start": {"pid": 7}}}, error={"code": "deadline_exceeded", "message": "late"})
        out, err, status = done
        end = {"exited": True, "status": f"exit status {status}", **({"exitCode": status} if status else {})}
        parts = [out[: len(out) // 2], out[len(out) // 2 :]]
        data = [{"event": {"data": {"stdout": base64.b64encode(part).decode()}}} for part in parts]
        said = {"event": {"data": {"stderr": base64.b64encode(err).decode()}}}
        return events(
            {"event": {"start": {"pid": 7}}}, {"event": {"keepalive": {}}}, *data, said, {"event": {"end": end}}
        )

    # --- Daytona

    async def daytona_create(self, request):
        wanted = await request.json()
        machine = self._new(wanted, 60 * wanted["autoStopInterval"])
        return web.json_response(self._state(machine, "creating"))

    def _state(self, machine: Machine, state: str) -> dict:
        return {"id": machine.name, "state": state, "toolboxProxyUrl": f"http://127.0.0.1:{self.port}/toolbox"}

    async def daytona_state(self, request):
        return web.json_response(self._state(self.machines[request.match_info["id"]], "started"))

    async def daytona_autostop(self, request):
        self._live(self.machines[request.match_info["id"]], 60 * int(request.match_info["minutes"]))
        return web.Response()

    async def daytona_write(self, request):
        form = await request.post()
        self.machines[request.match_info["id"]].write(form["files[0].path"], form["files[0].file"].file.read())
        return web.json_response({})

    async def daytona_execute(self, request):
        given = await request.json()
        assert given["timeout"] == math.ceil(given["timeout"])
        machine = self.machines[request.match_info["id"]]
        done = await machine.execute(
            ["sh", "-c", given["command"].replace("/tmp/", f"{machine.folder}/")], given["timeout"]
        )
        if done == LATE:
            return web.json_response({"message": "command execution timeout"}, status=408)
        out, err, status = done
        return web.json_response({"exitCode": status, "result": (out + err).decode("utf-8", "replace")})


def events(*messages: dict, error: dict | None = None) -> web.Response:
    """A stream of the Connect protocol, in JSON."""
    parts = [(0, one) for one in messages] + [(2, {"error": error} if error else {})]
    texts = [(flags, json.dumps(one).encode()) for flags, one in parts]
    body = b"".join(struct.pack(">BI", flags, len(text)) + text for flags, text in texts)
    return web.Response(body=body, content_type="application/connect+json")
