"""Many connections at once: waiting clients and those that die keep nobody else from being served."""

import asyncio
import json
import os
import time
from urllib.parse import urlsplit

from tests.service.conftest import Client
from tests.service.test_service import DATUM, TEXT

CROWD = 200
UNHURT_S = 20.0  # a question for a result that is not there lasts 25 s
PATIENCE_S = 60.0


def sockets(server):
    """Number of the server's open files."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


async def until(holds):
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.05)


async def ask(server, key, request_id):
    """Send a question for a result on a connection of its own; nobody reads the answer yet."""
    place = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    body = json.dumps({"request_id": request_id}).encode()
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {place.netloc}\r\nX-API-Key: {key}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


def train_and_sample(client):
    """Everything that a client needs; returns how long it took."""
    started = time.monotonic()
    session = client.session()
    model = client.model(session)
    client.trained(model, 1, [DATUM])
    assert "metrics" in client.step(model, 2, learning_rate=0.01)
    saved = client.do("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0)
    assert client.sample(saved["sampling_session_id"], 0, TEXT)[0]
    assert client.post(f"sessions/{session}/finish", reason={"type": "success"})[0] == 200
    return time.monotonic() - started


def test_two_hundred_waiting_connections_of_which_half_die_keep_nobody_waiting(server, client):
    waiting = client.model(client.session())
    _, promise = client.train(waiting, 2, [DATUM])  # 1 has not come: there is no result yet
    other = Client(server, server.add_key("beside"))
    train_and_sample(other)
    before = sockets(server)

    async def crowd():
        asked = [await ask(server, client.key, promise["request_id"]) for _ in range(CROWD)]
        await until(lambda: sockets(server) >= before + CROWD)
        took = await asyncio.to_thread(train_and_sample, other)
        assert took < UNHURT_S
        for _, writer in asked[::2]:
            writer.transport.abort()
        alive = asked[1::2]
        await asyncio.to_thread(client.trained, waiting, 1, [DATUM])
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*(reader.read() for reader, _ in alive))
        for _, writer in alive:
            writer.close()
        return answers

    answers = asyncio.run(crowd())
    assert len(answers) == CROWD // 2
    assert all(one.startswith(b"HTTP/1.1 200") and b"loss:sum" in one for one in answers)
    asyncio.run(until(lambda: sockets(server) <= before + 2))
