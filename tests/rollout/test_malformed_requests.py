"""Requests that no client of hone writes, to the built-in engine's server: each gets one error, the others go on."""

import asyncio
import json

import aiohttp
import pytest
import uvicorn

from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.workers.inside.builtin import EngineApp

TOKEN = "0123456789abcdef"
SAMPLING = {"max_tokens": 3, "temperature": 1.0, "top_k": 0, "stop_token_ids": [], "ignore_eos": True, "seed": 1}
GOOD = {"request_id": "good", "token_ids": [9, 10, 11], "sampling": SAMPLING}
OFFER = {"format": 2, "transport": "ipc", "version": 3, "payload": {"kind": "full"}, "timeout_s": 1.0, "replica": "r0"}
OFFER["address"] = {"session": "a", "memory": "/nobody", "channel": "ipc:///nobody"}
WRONG = [None, True, 1.5, "x", [3], [None], [1.5], {"a": 1}, 10**30, float("inf")]


def changed(part, names, wrong):
    return [{**part, name: one} for name in names for one in wrong]


REQUESTS = [
    *(("generate", {**GOOD, "request_id": "bad", "sampling": one}) for one in changed(SAMPLING, ["top_k"], WRONG)),
    *(
        ("generate", {**GOOD, "request_id": "bad", "sampling": one})
        for one in changed(SAMPLING, ["seed"], [one for one in WRONG if one != 10**30])
    ),
    *(
        ("generate", {**GOOD, "request_id": "bad", "sampling": one})
        for one in changed(SAMPLING, ["keep_kv", "routed_experts"], [None, 3, [], {"a": 1}])
    ),
    *(("generate", {**GOOD, "sampling": one}) for one in WRONG[:5]),
    *(("generate", {**GOOD, "token_ids": one}) for one in (None, 3, "x", [1.5], [True], ["a"], [None], [10**30], [-1])),
    *(("score", one) for one in changed({**GOOD, "top_k": 1}, ["top_k"], [-1, "x", None, [], float("inf")])),
    *(("score", one) for one in changed({**GOOD, "top_k": 1}, ["token_ids"], [[1.5], [True], [[1]], None, {}])),
    *(("receive_weights", {"offer": one}) for one in [None, 3, [], "a"]),
    *(("receive_weights", {"offer": one}) for one in changed(OFFER, ["timeout_s"], [*WRONG, -1, 0])),
    *(("receive_weights", {"offer": one}) for one in changed(OFFER, ["address", "payload", "transport"], WRONG[:5])),
]
RAW = [b"", b"[", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"token_ids": ' + b"9" * 5000 + b"}"]


@pytest.fixture
def ask(tiny, tmp_path):
    """`ask(requests)`: status and text of each, and the tokens of the good requests that ran beside them."""

    async def whole(requests):
        model = tiny("qwen3")
        engine = BuiltinEngine(BuiltinSettings(), model.config, None, "cpu", "r0")
        await engine.update_weights(list(model.state_dict().items()), 1)
        app, path = EngineApp(engine, TOKEN).app, str(tmp_path / "s")
        server = uvicorn.Server(uvicorn.Config(app, uds=path, lifespan="off", log_level="error", access_log=False))
        serving = asyncio.create_task(server.serve())
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path), headers=headers) as http:

            async def post(verb, body):
                data = body if isinstance(body, bytes) else json.dumps(body)
                async with http.post(f"http://s/{verb}", data=data, timeout=aiohttp.ClientTimeout(total=20)) as reply:
                    return reply.status, await reply.text()

            found = []
            for number, (verb, body) in enumerate(requests):
                good = {**GOOD, "request_id": f"good {number}", "sampling": {**SAMPLING, "max_tokens": 8}}
                found.append(await asyncio.gather(post("generate", good), post(verb, body)))
        server.should_exit = True
        await serving
        return found

    return lambda requests: asyncio.run(whole(requests))


def test_each_malformed_request_is_one_error_and_those_beside_it_are_answered(ask):
    requests = [*REQUESTS, *(("generate", one) for one in RAW)]
    tokens = set()
    for (verb, body), ((status, good), (refused, text)) in zip(requests, ask(requests), strict=True):
        assert status == 200, (verb, body)
        tokens.add(tuple(json.loads(good)["token_ids"]))
        assert refused == 400 or (refused == 500 and verb == "receive_weights"), (verb, body, text)
        error = json.loads(text)["error"]
        assert error, (verb, body)
        assert "\n" not in error, (verb, body)
        assert "replica r0 failed" not in error, (verb, body)
        assert len(error) < 400, (verb, body)
    assert len(tokens) == 1
