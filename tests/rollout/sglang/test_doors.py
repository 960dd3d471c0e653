"""Without the run's token SGLang's server answers nobody, and through doors that hone does not use nobody at all."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

pytestmark = pytest.mark.sglang

OPEN = {
    "/ready",
    "/server_info",
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weights_from_ipc",
    "/release_memory_occupation",
    "/resume_memory_occupation",
}
UNPICKLING = {"/update_weights_from_tensor", "/load_lora_adapter_from_tensors"}


@pytest.fixture(scope="module")
def paths(sglang_python):
    """Every path that SGLang's own source opens."""
    (source,) = sglang_python.parents[1].glob("lib/python*/site-packages/sglang/srt/entrypoints/http_server.py")
    routes = r"@app\.(?:get|head|post|put|delete|api_route|websocket)\(\s*\"(/[^\"]*)\""
    found = {path for path in re.findall(routes, source.read_text()) if "{" not in path}
    assert found > OPEN | UNPICKLING
    return sorted(found | {"/", "/docs", "/openapi.json", "/no/such/path"})


def knock(server, paths, headers):
    """Status of every path, asked by POST and by GET through the server's own socket."""

    async def story():
        connector = aiohttp.UnixConnector(str(server._folder / "s"), limit=8)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one(method, path):
                async with session.request(method, f"http://x{path}", json={}, headers=headers) as reply:
                    return reply.status

            calls = [(method, path) for path in paths for method in ("GET", "POST")]
            statuses = await asyncio.gather(*(one(*call) for call in calls))
            return dict(zip(calls, statuses, strict=True))

    return story()


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic {token}"}],
    ids=["none", "empty", "wrong", "scheme"],
)
def test_every_door_asks_for_the_token(sglang_server, paths, finish, headers):
    headers = {name: value.format(token=sglang_server._spec.token) for name, value in headers.items()}
    assert set(finish(knock(sglang_server, paths, headers)).values()) == {401}


def test_doors_that_hone_does_not_use_are_shut_with_the_token_too(sglang_server, paths, finish):
    """Some of SGLang's unpickle what they are sent."""
    headers = {"Authorization": f"Bearer {sglang_server._spec.token}"}
    shut = [path for path in paths if path not in OPEN]
    assert set(shut) >= UNPICKLING
    assert set(finish(knock(sglang_server, shut, headers)).values()) == {404}
    assert finish(knock(sglang_server, ["/ready"], headers))[("GET", "/ready")] == 200


def test_a_websocket_is_refused(sglang_server, finish):
    async def story():
        connector = aiohttp.UnixConnector(str(sglang_server._folder / "s"))
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect("http://x/v1/realtime")

    finish(story())


def test_the_token_stands_on_no_command_line_and_in_no_log(sglang_server):
    token = sglang_server._spec.token
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in sglang_server._server.process_ids()]
    assert any("hone.workers.sglang" in line for line in lines)
    assert not any(token in line for line in lines)
    assert token not in sglang_server._server.log.read_text()


def test_its_sockets_are_for_this_user_only(sglang_server):
    assert sglang_server._folder.stat().st_mode & 0o077 == 0
