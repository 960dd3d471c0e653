"""Nobody without the run's token gets an answer from vLLM's server, whatever the path."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

pytestmark = pytest.mark.vllm

CONTROL = (
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
)


def knock(server, paths, headers):
    """Status of every path, asked by POST and by GET through the server's own socket."""

    async def story():
        connector = aiohttp.UnixConnector(str(server._folder / "s"))
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
def test_every_door_asks_for_the_token(plain, finish, headers):
    headers = {name: value.format(token=plain._spec.token) for name, value in headers.items()}
    known = finish(plain._request("GET", "/openapi.json"))["paths"]
    assert {"/collective_rpc", "/update_weights", "/pause", "/inference/v1/generate"} <= set(known)
    statuses = finish(knock(plain, sorted({*known, *CONTROL, "/", "/no/such/path"}), headers))
    assert set(statuses.values()) == {401}


def test_with_the_token_it_answers(plain, finish):
    headers = {"Authorization": f"Bearer {plain._spec.token}"}
    assert finish(knock(plain, ["/health"], headers))[("GET", "/health")] == 200


def test_a_websocket_is_refused(plain, finish):
    async def story():
        connector = aiohttp.UnixConnector(str(plain._folder / "s"))
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect("http://x/v1/realtime")

    finish(story())


def test_the_token_stands_on_no_command_line_and_in_no_log(plain):
    token = plain._spec.token
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in plain._server.process_ids()]
    assert any("api_server" in line for line in lines)
    assert not any(token in line for line in lines)
    assert token not in plain._server.log.read_text()


def test_its_socket_is_for_this_user_only(plain):
    assert plain._folder.stat().st_mode & 0o077 == 0
