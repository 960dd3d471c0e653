"""Servers that spread their model over two processes (tensor parallel), with a LoRA adapter; at the end, a death."""

import asyncio
import copy
import os
import signal

import pytest
import torch

from hone.rollout.base import ReplicaLost
from hone.types import GenerationRequest, SamplingParams
from hone.weights.base import AdapterTensors, WeightSyncError
from tests.rollout.conftest import REAL, REAL_ENGINES
from tests.rollout.receipts import served_digest

ROOM = {
    "vllm": {"enable_lora": True, "max_lora_rank": 8},
    "sglang": {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras_per_batch": 2,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
        "lora_backend": "torch_native",
    },
}
PROMPTS = [(9, 10, 11), (50,), tuple(range(20, 44))]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
TARGETS = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture(scope="module", params=REAL_ENGINES)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def models(backend, tiny):
    return tiny(REAL[backend].model, seed=0), tiny(REAL[backend].model, seed=1)


@pytest.fixture(scope="module")
def two(backend, real_adapter, runner):
    server = real_adapter(backend, 1, engine=ROOM[backend], tensor_parallel=2)
    runner.run(server.start())
    yield server
    runner.run(server.close())


@pytest.fixture
def pair(two, push, models):
    """A server of two processes with the first model's weights as version 0."""
    push(two, list(models[0].state_dict().items()), 0)
    return two


def adapter(model, seed, layer=None):
    """LoRA tensors under PEFT's names."""
    torch.manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            name = name if layer is None else name.replace("layers.0", f"layers.{layer}")
            found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, module.in_features)
            found[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(module.out_features, 4)
    return found


def merged(base, tensors):
    """A model with the adapter added to its weights: W + (alpha / r) B A."""
    model = copy.deepcopy(base)
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            module.weight.data += 8 / 4 * b @ a
    return model


def test_both_ranks_prove_all_weights_and_sample_from_them(pair, models, push, sample, gap):
    sent = list(models[1].state_dict().items())
    receipts = push(pair, sent, 2)
    assert [receipt.digest for receipt in receipts] == [served_digest(sent)] * 2
    for prompt, completion in zip(PROMPTS, sample(pair, PROMPTS), strict=True):
        assert set(completion.weight_versions) == {2}
        assert gap(models[1], prompt, completion) < 1e-4


def test_a_tensor_that_is_not_sent_is_named_by_each_rank(pair, models, push):
    sent = [(name, tensor) for name, tensor in models[1].state_dict().items() if name != "lm_head.weight"]
    with pytest.raises(WeightSyncError, match=r"worker 0: .*lm_head.weight.*worker 1: .*lm_head.weight"):
        push(pair, sent, 3)


def test_an_adapter_changes_what_is_sampled_to_what_merging_gives(pair, models, push, sample, gap):
    for version, seed in ((5, 0), (6, 1)):  # the second takes the place of the first, under the same name
        tensors = adapter(models[0], seed)
        receipts = push(pair, list(tensors.items()), version, AdapterTensors("policy", CONFIG))
        assert [receipt.digest for receipt in receipts] == [served_digest(tensors.items())] * 2
        assert pair.weight_version == version
        model = merged(models[0], tensors)
        for prompt, completion in zip(PROMPTS, sample(pair, PROMPTS), strict=True):
            assert set(completion.weight_versions) == {version}
            assert gap(model, prompt, completion) < 1e-4
            assert gap(models[0], prompt, completion) > 0.05


def test_whole_weights_take_the_place_of_an_adapter(pair, models, push, sample, gap):
    push(pair, list(adapter(models[0], 0).items()), 7, AdapterTensors("policy", CONFIG))
    push(pair, list(models[1].state_dict().items()), 8)
    assert gap(models[1], PROMPTS[0], sample(pair, PROMPTS)[0]) < 1e-4


def test_an_adapter_that_is_bound_to_nothing_is_refused(pair, models, push, sample):
    with pytest.raises(WeightSyncError, match=r"worker 0: .*layers\.9.* model.*worker 1: "):
        push(pair, list(adapter(models[0], 0, layer=9).items()), 9, AdapterTensors("lost", CONFIG))
    assert pair.weight_version == -1
    with pytest.raises(RuntimeError, match="update_weights"):
        sample(pair, PROMPTS)
    push(pair, list(models[0].state_dict().items()), 10)
    push(pair, list(adapter(models[0], 0).items()), 11, AdapterTensors("policy", CONFIG))
    assert pair.weight_version == 11


def test_an_adapter_that_is_too_large_is_refused(pair, models, push, sample, gap):
    tensors = {
        name: tensor.repeat(1, 4) if "lora_B" in name else tensor.repeat(4, 1)
        for name, tensor in adapter(models[0], 0).items()
    }
    with pytest.raises(WeightSyncError, match=r"worker 0: .*rank 16.*worker 1: "):
        push(pair, list(tensors.items()), 9, AdapterTensors("wide", {**CONFIG, "r": 16}))
    push(pair, list(models[1].state_dict().items()), 10)
    assert gap(models[1], PROMPTS[0], sample(pair, PROMPTS)[0]) < 1e-4


def test_an_adapter_needs_whole_weights_first(pair, models, push, finish):
    finish(pair.stop("a test says so"))
    with pytest.raises(WeightSyncError, match="whole weights come before an adapter"):
        push(pair, list(adapter(models[0], 0).items()), 10, AdapterTensors("policy", CONFIG))


def test_a_dead_worker_is_noticed_within_seconds_and_nothing_is_left(pair, finish):
    """One of the tensor-parallel workers is killed in the middle of a request: the whole server ends."""
    pids = pair.connection.process.process_ids()
    wanted = SamplingParams(max_tokens=100, ignore_eos=True)

    async def story():
        tasks = [asyncio.create_task(pair.generate(GenerationRequest(f"r{i}", (9,), wanted))) for i in range(40)]
        await asyncio.sleep(0.02)
        os.kill(pids[-1], signal.SIGKILL)
        async with asyncio.timeout(30):  # SGLang by itself would take over a minute
            done = await asyncio.gather(*tasks, return_exceptions=True)
            await pair.connection.process.wait_dead()
        return done

    done = finish(story())
    others = [result for result in done if not isinstance(result, ReplicaLost)]
    assert others == [], "the router sends each of them elsewhere"
    assert not pair.alive
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    with pytest.raises(ReplicaLost):
        finish(pair.generate(GenerationRequest("late", (9,), wanted)))
