"""A service that is killed (SIGKILL) and started again: nothing that was confirmed is lost, and no bit changes."""

import socket
import urllib.error
from random import Random

import numpy as np
import pytest

from tests.service.conftest import Client, Server

STEPS = 4
PROMPT = [10, 11, 12, 13]


@pytest.fixture
def mortal(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    made = Server(tmp_path, listen={"port": port})
    yield made
    made.close()


class Patient(Client):
    """A client that asks again after a lost connection, as the real one does."""

    def call(self, *arguments, **named):
        for _ in range(3):
            try:
                return super().call(*arguments, **named)
            except (urllib.error.URLError, ConnectionError):
                self.server.start()
        pytest.fail("the service does not come back")


def datum(number):
    tokens = np.random.default_rng(number).integers(8, 90, 7).tolist()
    return tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * 6}


def trained(client, model, kill):
    """Two gradients and an optimizer step, `STEPS` times; `kill()` is called between any two requests."""
    for number in range(STEPS):
        seq = 3 * number + 1
        taken = []
        for more in range(2):
            taken.append(client.train(model, seq + more, [datum(seq + more)]))
            kill()
        taken.append(client.post("optim_step", model_id=model, seq_id=seq + 2, adam_params={"learning_rate": 0.01}))
        kill()
        results = [client.result(*one) for one in taken]
        assert all(isinstance(one, bytes) for one in results[:2])
        assert "metrics" in results[2], results[2]
    logprobs, _ = client.trained(model, 3 * STEPS + 1, [datum(0)], forward_only=True)
    return logprobs[0].tobytes()


@pytest.mark.slow
def test_killed_at_any_request_two_models_end_with_the_bits_of_an_uninterrupted_run(mortal):
    client = Patient(mortal)
    session = client.session()
    ranks = (4, 16)
    models = [client.model(session, number, rank=rank) for number, rank in enumerate(ranks)]
    alone = [trained(client, model, lambda: None) for model in models]
    random, kills = Random(5), []

    def kill():
        if random.random() < 0.25 and len(kills) < 3:
            kills.append(1)
            mortal.kill()

    again = [client.model(session, 2 + number, rank=rank) for number, rank in enumerate(ranks)]
    assert [trained(client, model, kill) for model in again] == alone
    assert len(kills) == 3


def test_what_was_confirmed_is_there_after_a_kill_and_what_was_not_is_nowhere(mortal, tmp_path):
    client = Patient(mortal)
    session = client.session()
    model = client.model(session)
    client.trained(model, 1, [datum(1)])
    client.step(model, 2, learning_rate=0.1)
    path = client.do("save_weights", model_id=model, seq_id=3, path="kept")["path"]
    snapshot = client.do("save_weights_for_sampler", model_id=model, seq_id=4, sampling_session_seq_id=0)
    before = client.sample(snapshot["sampling_session_id"], 0, PROMPT)[0]
    request = client.post("save_weights", model_id=model, seq_id=5, path="perhaps")[1]["request_id"]
    checkpoints = tmp_path / "run/checkpoints"
    (checkpoints / "half-written").mkdir()
    mortal.kill()
    assert client.post("session_heartbeat", session_id=session)[0] == 200  # the session goes on
    assert not (checkpoints / "half-written").exists()
    assert client.result(200, {"request_id": request})["path"].endswith("/perhaps")  # it had been taken
    assert client.sample(snapshot["sampling_session_id"], 1, PROMPT)[0] == before
    assert "there is a checkpoint" in client.do("save_weights", model_id=model, seq_id=6, path="kept")["error"]
    assert client.do("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)["path"] == path


def test_a_snapshot_whose_bytes_changed_is_not_served(mortal, tmp_path):
    client = Patient(mortal)
    model = client.model(client.session())
    client.do("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
    snapshot = client.do("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=1)
    newest = max(tmp_path.glob("run/checkpoints/*/adapter_model.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    refused = client.sample(snapshot["sampling_session_id"], 0, PROMPT)
    assert "has the digest" in refused["error"]
    assert refused["category"] == "server"
    other = snapshot["sampling_session_id"].removesuffix("1") + "0"
    assert len(client.sample(other, 0, PROMPT)[0]) == 1  # nobody else is hurt
