"""Many connections at once: waiting clients and those that die keep nobody else from being served."""

import asyncio
import json
import os
from urllib.parse import urlsplit

from tests.service.conftest import Client
from tests.service.test_service import DATUM, TEXT

CROWD = 200
PATIENCE_S = 240.0  # a server with a thread for each client needs longer: each client waits 25 s, and asks again


def sockets(server):
    """Number of the server's open files."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


async def until(holds):
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.05)


class Waiting:
    """A client with a connection of its own that asks for a result until there is one."""

    def __init__(self, server, key, request_id):
        self._place = urlsplit(server.url)
        body = json.dumps({"request_id": request_id})
        self._question = (
            f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {self._place.netloc}\r\nX-API-Key: {key}\r\n"
            f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self._writer = None

    async def ask(self):
        while True:
            reader, self._writer = await asyncio.open_connection(self._place.hostname, self._place.port)
            self._writer.write(self._question)
            answer = await reader.read()
            self._writer.close()
            if b"try_again" not in answer:
                return answer

    def die(self):
        self._writer.transport.abort()


def train_and_sample(client):
    """Everything that a client needs."""
    session = client.session()
    model = client.model(session)
    client.trained(model, 1, [DATUM])
    assert "metrics" in client.step(model, 2, learning_rate=0.01)
    saved = client.do("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0)
    assert client.sample(saved["sampling_session_id"], 0, TEXT)[0]
    assert client.post(f"sessions/{session}/finish", reason={"type": "success"})[0] == 200


def test_two_hundred_waiting_connections_of_which_half_die_keep_nobody_waiting(server, client):
    waiting = client.model(client.session())
    _, promise = client.train(waiting, 2, [DATUM])  # 1 has not come: there is no result yet
    other = Client(server, server.add_key("beside"))
    train_and_sample(other)
    before = sockets(server)

    async def crowd():
        clients = [Waiting(server, client.key, promise["request_id"]) for _ in range(CROWD)]
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            asked = [group.create_task(one.ask()) for one in clients]
            await until(lambda: sockets(server) > CROWD)  # `before` may count a connection that was about to end
            await asyncio.to_thread(train_and_sample, other)
            assert not any(one.done() for one in asked)
            for one, task in zip(clients[::2], asked[::2], strict=True):
                task.cancel()
                one.die()
            await asyncio.to_thread(client.trained, waiting, 1, [DATUM])
        return [task.result() for task in asked[1::2]]

    answers = asyncio.run(crowd())
    assert len(answers) == CROWD // 2
    assert all(one.startswith(b"HTTP/1.1 200") and b"loss:sum" in one for one in answers)
    asyncio.run(until(lambda: sockets(server) <= before + 2))  # the dead ones are closed
