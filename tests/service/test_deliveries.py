"""Requests that are reordered, sent again, cut off, delayed or never answered have one outcome."""

import json
import socket
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.conftest import Client
from tests.service.test_service import TEXT, datum

COMMANDS = 6
LAST_FIELD = len("xxcross_entropy")  # bytes; without it the rest is a whole message of protobuf, of another content


class Written(Client):
    """A client whose requests are not sent: each is the bytes of an HTTP request."""

    def call(self, method, path, body=None, kind="application/json", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"{method} /api/v1/{path} HTTP/1.1\r\nHost: {urlsplit(self.server.url).netloc}\r\nX-API-Key: {self.key}\r\n"
            f"Connection: close\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


def command(who, model, sampler, number):
    """Command 1 to `COMMANDS` of a model, of which every third is an optimizer step, or a sampling request (0)."""
    if number == 0:
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}, "num_samples": 1}
        params = {"max_tokens": 4, "seed": 7}
        return who.post("asample", sampling_session_id=sampler, seq_id=5, sampling_params=params, **body)
    if number % 3 == 0:
        return who.post("optim_step", model_id=model, seq_id=number, adam_params={"learning_rate": 0.01})
    return who.train(model, number, [datum(number)])


def opened(client, number):
    session = client.session()
    place = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", **place)[1]["sampling_session_id"]
    return client.model(session, number), sampler


def finished(client, model, sampler):
    """Send every command until it is answered; the results, and the log-probs of the model that has them all."""
    found = [client.result(*command(client, model, sampler, number)) for number in range(COMMANDS + 1)]
    logprobs, _ = client.trained(model, COMMANDS + 1, [datum(0)], forward_only=True)
    return found, logprobs[0].tobytes()


@pytest.fixture(scope="module")
def undisturbed(server):
    client = Client(server)
    return finished(client, *opened(client, 0))


class Deliveries:
    """Connections to a server, some of which are in the middle of a request."""

    def __init__(self, server):
        place = urlsplit(server.url)
        self._place, self._open = (place.hostname, place.port), []

    def _sent(self, content):
        connection = socket.create_connection(self._place, timeout=60)
        connection.sendall(content)
        return connection

    def whole(self, request):
        connection = self._sent(request)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        connection.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer

    def cut(self, request):
        self._sent(request[: len(request) - LAST_FIELD]).close()

    def unread(self, request):
        self._sent(request).close()

    def delayed(self, request):
        self._open.append((self._sent(request[: len(request) // 2]), request[len(request) // 2 :]))

    def end(self):
        """Send the delayed requests. Each gets the answer that its first sending got."""
        for connection, rest in self._open:
            connection.sendall(rest)
            answer = b"".join(iter(lambda one=connection: one.recv(1 << 16), b""))
            connection.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer


WAYS = ("whole", "cut", "unread", "delayed")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(WAYS), st.integers(0, COMMANDS)), max_size=12))
def test_however_requests_arrive_a_model_ends_with_the_same_bits_and_results(server, undisturbed, events):
    client, written, deliveries = Client(server), Written(server), Deliveries(server)
    model, sampler = opened(client, 0)
    for way, number in events:
        getattr(deliveries, way)(command(written, model, sampler, number))
    found, logprobs = finished(client, model, sampler)
    deliveries.end()
    assert (found, logprobs) == undisturbed
    again = [client.result(*command(client, model, sampler, number)) for number in range(COMMANDS + 1)]
    assert again == found
    client.post(f"sessions/{model.partition(':')[0]}/finish", reason={"type": "success"})
