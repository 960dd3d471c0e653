"""A service that samples with vLLM: every snapshot, and the base, are what the trainer has."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hone.config import ConfigError
from hone.models.settings import BuildConfig, ModelConfig
from hone.rollout.settings import RolloutConfig
from hone.service.protocol.wire import MESSAGES
from hone.testing.training import save_model
from hone.workers.tenants.served import ServedRollout
from tests.families.checks import VLLM_PYTHON
from tests.service.conftest import Client, Server
from tests.service.test_service import DATUM, TEXT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM_PYTHON.is_file(), reason="there is no .venv-vllm: make .venv-vllm"),
]
CLOSE = 1e-4  # largest difference of two log-probs


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    build = BuildConfig(hidden_size=64, layers=2, heads=2, head_size=32, mlp_size=64, max_positions=256)
    server = Server(
        folder,
        model={"path": str(save_model(build, folder / "model"))},
        training={"compute_dtype": "float32", "max_lora_rank": 8},
        rollout={
            "backend": "vllm",
            "python": str(VLLM_PYTHON),
            "engine": {"kv_cache_memory_bytes": 2**26, "max_loras": 3},
        },
    )
    yield Client(server)
    server.close()


def prompt_logprobs(client, session, seq):
    found = client.sample(session, seq, TEXT, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert isinstance(found, tuple), found
    sequences, message = found
    assert len(sequences[0]) == 4
    return np.frombuffer(message.prompt_logprobs, "<f4")[1:]


def taught(client, number, rank, rate):
    """A model after two steps: its id, its snapshot's session, and its log-probs."""
    model = client.model(client.session(), number, rank=rank)
    for seq in (1, 3):
        client.trained(model, seq, [DATUM])
        client.step(model, seq + 1, learning_rate=rate)
    saved = client.do("save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=0)
    (logprobs,), _ = client.trained(model, 6, [DATUM], forward_only=True)
    return saved["sampling_session_id"], logprobs


@pytest.mark.ci
def test_snapshots_and_the_base_are_served_and_each_is_the_trainer_s(client):
    session = client.session()
    (untouched,), _ = client.trained(client.model(session), 1, [DATUM], forward_only=True)
    of_base = {"session_id": session, "sampling_session_seq_id": 9, "base_model": "tiny"}
    base = client.post("create_sampling_session", **of_base)[1]["sampling_session_id"]
    small, large = taught(client, 1, 4, 0.02), taught(client, 2, 8, 0.05)
    assert np.abs(small[1] - large[1]).max() > 0.1 < np.abs(small[1] - untouched).max()
    wanted = [small, (base, untouched), large, (base, untouched), small, large]
    for seq, (where, logprobs) in enumerate(wanted):
        assert np.abs(prompt_logprobs(client, where, seq) - logprobs).max() < CLOSE


def test_more_snapshots_than_places_answer_at_once_and_each_for_itself(client):
    taken = [taught(client, 10 + number, 4 + number % 5, 0.02 + 0.01 * number) for number in range(6)]  # two places
    sent = []
    for seq in range(2):  # every second one first, so that places change while others answer
        for where, logprobs in taken[seq::2] + taken[1 - seq :: 2]:
            body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}, "prompt_logprobs": True}
            params = {"max_tokens": 40, "seed": 7, "stop": []}
            asked = client.post(
                "asample", sampling_session_id=where, seq_id=seq, num_samples=4, sampling_params=params, **body
            )
            sent.append((asked, logprobs))
    for asked, logprobs in sent:
        found = client.result(*asked)
        assert isinstance(found, bytes), found
        message = MESSAGES["SampleResponse"]()
        message.ParseFromString(found)
        assert [len(one.tokens) // 4 for one in message.sequences] == [40] * 4
        assert np.abs(np.frombuffer(message.prompt_logprobs, "<f4")[1:] - logprobs).max() < CLOSE


def commands():
    """The pid and the words of every process."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            yield int(file.parent.name), file.read_text().replace("=", "\0").split("\0")


def test_a_server_that_is_killed_is_started_again_with_the_snapshot_that_is_asked_for(client):
    small, large = taught(client, 3, 4, 0.02), taught(client, 6, 8, 0.05)
    for seq, (where, logprobs) in enumerate((small, small, large)):  # killed before the second: the same is asked for
        assert np.abs(prompt_logprobs(client, where, seq) - logprobs).max() < CLOSE
        if seq < 2:
            kill_server(client)


def kill_server(client):
    model = str(client.server.folder / "model")
    started = ["-m", "hone.workers.inside.vllm_server"]
    (pid,) = (one for one, words in commands() if words[1:3] == started and model in words)
    os.kill(pid, signal.SIGKILL)


def test_a_damaged_snapshot_is_refused_and_another_is_served_with_chosen_tokens_scored(client):
    before = snapshots(client)
    damaged, _ = taught(client, 4, 4, 0.02)
    (file,) = snapshots(client) - before
    whole, logprobs = taught(client, 5, 4, 0.03)
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    assert "it is not served" in str(client.sample(damaged, 0, TEXT))
    assert np.abs(prompt_logprobs(client, whole, 0) - logprobs).max() < CLOSE
    assert "it is not served" in str(client.sample(damaged, 1, TEXT))
    targets = {"dtype": "int64", "shape": [5, 1], "data": TEXT[1:]}
    _, message = client.sample(whole, 1, TEXT, target_prompt_logprobs=targets)
    assert np.abs(np.frombuffer(message.target_prompt_logprobs.dense, "<f4") - logprobs).max() < CLOSE


def test_an_answer_that_fills_the_context_and_a_prompt_of_one_token_have_their_likely_tokens(client):
    where, _ = taught(client, 7, 4, 0.02)
    long = {"max_tokens": 1000, "stop": []}
    (answer,), message = client.sample(where, 0, TEXT[:1], sampling_params=long, topk_sample_logprobs=2)
    assert len(answer) == 254  # of 256 places one has the prompt, and one is for vLLM's token after what it scores
    assert message.sequences[0].topk_sampled_logprobs.k == 2
    _, message = client.sample(where, 1, TEXT[:1], topk_prompt_logprobs=2)
    assert (message.topk_prompt_logprobs.k, message.topk_prompt_logprobs.length) == (2, 1)


def test_a_single_place_for_adapters_is_refused(tmp_path):
    build = BuildConfig(hidden_size=64, layers=1, heads=2, head_size=32, mlp_size=64)
    model = ModelConfig(path=str(save_model(build, tmp_path / "model")))
    with pytest.raises(ConfigError, match="max_loras should be 2 or more"):
        ServedRollout(model, RolloutConfig(backend="vllm", engine={"max_loras": 1}), "float32", 8, tmp_path)


def test_a_rank_that_vllm_does_not_take_is_refused(tmp_path):
    build = BuildConfig(hidden_size=64, layers=1, heads=2, head_size=32, mlp_size=64)
    model = ModelConfig(path=str(save_model(build, tmp_path / "model")))
    with pytest.raises(ConfigError, match="max_lora_rank=600: vLLM takes ranks up to 512"):
        ServedRollout(model, RolloutConfig(backend="vllm"), "float32", 600, tmp_path)


def snapshots(client):
    return set(client.server.folder.glob("run/**/adapter_model.safetensors"))
