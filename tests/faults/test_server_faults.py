"""Faults planted in a server that receives weights: none of them is served, or what it does to log-probs shows.

The same faults against real engines: tests/rollout/servers/vllm/test_weights.py (a tensor that is not sent, a tied
head among them; half an update; a prefix cache that is kept, with and without the probe) and
tests/rollout/servers/test_pair.py (an adapter that is bound to nothing).
"""

import asyncio
import secrets
from pathlib import Path

import pytest
import torch

from hone.rollout.base import ServerSpec
from hone.rollout.servers.builtin import BuiltinServer
from hone.rollout.settings import RolloutConfig
from hone.types import GenerationRequest, SamplingParams
from hone.weights.base import AdapterTensors, WeightSyncError
from tests.rollout.syncing import sync_to

PROMPT = (9, 10, 11)
LONG = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


class Faulty(BuiltinServer):
    program = (str(Path(__file__).with_name("faulty_server.py")),)


@pytest.fixture(scope="module")
def finish(runner):
    return lambda coroutine: runner.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture(scope="module")
def models(tiny):
    return tiny("qwen3", seed=0), tiny("qwen3", seed=1)


@pytest.fixture(scope="module")
def started(models, tokenizer, finish, tmp_path_factory):
    """The server, and the file in which its fault stands."""
    folder = tmp_path_factory.mktemp("faulty")
    models[0].save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "fault").write_text("")
    environment = {"HONE_TEST_FAULT": str(folder / "fault")}
    spec = ServerSpec(
        RolloutConfig(start_timeout_s=120),
        str(folder / "model"),
        "float32",
        0,
        folder,
        secrets.token_hex(16),
        environment=environment,
    )
    server = Faulty(spec)
    finish(server.start())
    yield server, folder / "fault"
    finish(server.close())


@pytest.fixture
def server(started, models, finish):
    """The server with the first model's weights as version 0, and `server.plant(fault)`."""
    made, file = started
    made.plant = file.write_text
    made.plant("")
    finish(sync_to(made, weights(models[0]), 0))
    return made


def weights(model):
    return list(model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["skipped", "stale head", "half"])
def test_weights_that_are_not_all_taken_in_are_never_served(server, models, finish, gap, fault):
    """The server says nothing of it: the digest of what it holds does."""
    server.plant(fault)
    with pytest.raises(WeightSyncError, match=r"digest .* the trainer sent .* a tensor was lost, stale or changed"):
        finish(sync_to(server, weights(models[1]), 1))
    assert server.weight_version == -1
    with pytest.raises(RuntimeError, match="it was stopped"):
        finish(server.generate(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=2))))
    server.plant("")
    finish(sync_to(server, weights(models[1]), 2))
    found = finish(server.generate(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=8))))
    assert gap(models[1], PROMPT, found) < 1e-5


@pytest.mark.parametrize("fault", ["", "kept cache"])
def test_a_cache_of_old_weights_shows_in_the_log_probs_of_the_tokens_after_it(server, models, finish, gap, fault):
    """No digest can tell: what a run measures at every token (`correction/max_abs_difference`) does."""

    async def story():
        server.metrics()
        running = asyncio.create_task(server.generate(GenerationRequest("r", PROMPT, LONG)))
        while "rollout/tokens" not in server._metrics or not server._metrics["rollout/tokens"].value:
            await asyncio.sleep(0.02)
            await server.look()
        server.plant(fault)
        await sync_to(server, weights(models[1]), 1)
        return await running

    found = finish(story())
    assert set(found.weight_versions) == {0, 1} or fault
    apart = gap(models[1], PROMPT, found, start=found.weight_versions.index(1))
    assert (apart > 0.01) if fault else (apart < 1e-5)


def test_an_adapter_that_is_bound_to_nothing_is_never_served(server, models, finish):
    torch.manual_seed(0)
    name = "base_model.model.model.layers.9.self_attn.q_proj.lora_{}.weight"
    tensors = [(name.format("A"), torch.randn(4, 32)), (name.format("B"), torch.randn(32, 4))]
    with pytest.raises(WeightSyncError, match=r"layers\.9"):
        finish(sync_to(server, tensors, 1, AdapterTensors("policy", LORA)))
    assert server.weight_version == -1
