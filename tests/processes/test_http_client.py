"""Requests to services, against a real server."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from hone.processes.http_client import http_session, proxy_of

MANY = 130  # more than aiohttp's own limit of connections


@pytest.fixture
def ask():
    """`ask(handler, requests)`: the texts that a server with this handler answers to so many requests at a time."""

    async def asked(handler, requests):
        app = web.Application()
        app.router.add_post("/", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2 * MANY).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"

        async def one(session):
            async with session.post(url) as reply:
                return await reply.text()

        try:
            async with asyncio.timeout(60), http_session() as session:
                return await asyncio.gather(*(one(session) for _ in range(requests)))
        finally:
            await runner.cleanup()

    return lambda handler, requests: asyncio.run(asked(handler, requests))


def test_no_request_waits_for_the_connection_of_another(ask):
    """Whoever bounds the programs that run at a time expects all of them to run."""
    barrier = asyncio.Barrier(MANY)

    async def answer(request):
        await barrier.wait()
        return web.Response(text="met")

    assert ask(answer, MANY) == ["met"] * MANY


def test_only_the_caller_ends_a_request(ask, monkeypatch):
    """aiohttp ends it after five minutes if it is not told otherwise."""
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.1))

    async def answer(request):
        await asyncio.sleep(0.5)
        return web.Response(text="late")

    assert ask(answer, 1) == ["late"]


def test_the_proxy_of_the_environment(monkeypatch):
    for name in ("ALL_PROXY", "all_proxy", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy.test:3128")
    monkeypatch.setenv("HTTP_PROXY", "socks5://me:word@proxy.test")
    monkeypatch.setenv("NO_PROXY", "near.test")
    assert proxy_of("https://far.test/v1") == "http://proxy.test:3128"
    assert [proxy_of(f"{url}/v1") for url in ("https://a.near.test:99", "http://localhost:1", "http://[::1]:1")] == [
        None
    ] * 3
    with pytest.raises(
        aiohttp.ClientError, match="HTTP_PROXY names a proxy of kind socks5; hone speaks HTTP to proxies"
    ):
        proxy_of("http://far.test/v1")
