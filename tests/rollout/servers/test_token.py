"""Nobody without the run's token gets an answer from a server; some paths are closed for everybody."""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest


@dataclass
class House:
    """A server, and every path that its engine knows."""

    server: object
    paths: list
    answers: str  # a path that does, with the token
    program: str  # in its command line

    async def knock(self, paths, headers):
        """Status of every path, asked by POST and by GET through the server's own socket."""
        connector = aiohttp.UnixConnector(str(self.server.connection.folder / "s"), limit=8)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one(method, path):
                async with session.request(method, f"http://x{path}", json={}, headers=headers) as reply:
                    return reply.status

            calls = [(method, path) for path in paths for method in ("GET", "POST")]
            statuses = await asyncio.gather(*(one(*call) for call in calls))
            return dict(zip(calls, statuses, strict=True))


VLLM = {  # that change something, or tell something; the rest is asked of the server
    "/collective_rpc",
    "/update_weights",
    "/start_weight_update",
    "/pause",
    "/resume",
    "/abort_requests",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/weight_info",
    "/v1/load_lora_adapter",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/health",
    "/metrics",
    "/openapi.json",
}
SGLANG_OPEN = {
    "/ready",
    "/server_info",
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/load_lora_adapter",
    "/update_weights_from_ipc",
    "/release_memory_occupation",
    "/resume_memory_occupation",
}
UNPICKLING = {"/update_weights_from_tensor", "/load_lora_adapter_from_tensors"}
ELSE = {"/", "/docs", "/openapi.json", "/no/such/path"}


@pytest.fixture
def vllm(real_server, finish):
    server = real_server("vllm")
    known = set(finish(server.connection.get("/openapi.json"))["paths"])
    assert {"/collective_rpc", "/update_weights", "/pause", "/inference/v1/generate"} <= known
    return House(server, sorted(known | VLLM | ELSE), "/health", "hone.workers.inside.vllm_server")


@pytest.fixture
def sglang(real_server, real_python):
    """Every path that SGLang's own source opens."""
    (source,) = real_python("sglang").parents[1].glob("lib/python*/site-packages/sglang/srt/entrypoints/http_server.py")
    routes = r"@app\.(?:get|head|post|put|delete|api_route|websocket)\(\s*\"(/[^\"]*)\""
    known = {path for path in re.findall(routes, source.read_text()) if "{" not in path}
    assert known > SGLANG_OPEN | UNPICKLING
    return House(real_server("sglang"), sorted(known | ELSE), "/ready", "hone_sglang.inside.process")


@pytest.fixture(
    params=[pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)],
)
def house(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic {token}"}],
    ids=["none", "empty", "wrong", "scheme"],
)
def test_every_path_asks_for_the_token(house, finish, headers):
    headers = {name: value.format(token=house.server._spec.token) for name, value in headers.items()}
    assert set(finish(house.knock(house.paths, headers)).values()) == {401}


def test_with_the_token_it_answers(house, finish):
    headers = {"Authorization": f"Bearer {house.server._spec.token}"}
    assert finish(house.knock([house.answers], headers))[("GET", house.answers)] == 200


def test_a_websocket_is_refused(house, finish):
    async def story():
        connector = aiohttp.UnixConnector(str(house.server.connection.folder / "s"))
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect("http://x/v1/realtime")

    finish(story())


def test_the_token_stands_on_no_command_line_and_in_no_log(house):
    token = house.server._spec.token
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in house.server.connection.process.process_ids()]
    assert any(house.program in line for line in lines)
    assert not any(token in line for line in lines)
    assert token not in house.server.connection.process.log.read_text()


def test_its_sockets_are_for_this_user_only(house):
    assert house.server.connection.folder.stat().st_mode & 0o077 == 0
