"""Servers whose ranks hold different layers (pipeline parallel): what each rank proves, with and without an adapter."""

import pytest

from hone.weights.base import AdapterTensors, WeightSyncError
from tests.rollout.receipts import served_digest
from tests.rollout.servers.test_pair import CONFIG, PROMPTS, adapter, merged

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def staged(real_adapter, runner):
    room = {"enable_lora": True, "max_lora_rank": 8}
    server = real_adapter("vllm", 2, engine={"pipeline_parallel_size": 2, **room})
    runner.run(server.start())
    yield server
    runner.run(server.close())


def tensors(model):
    return list(model.state_dict().items())


def test_every_stage_proves_all_weights_and_the_server_samples_from_them(staged, models, push, sample, gap):
    for version, model in enumerate((models[0], models[1])):
        receipts = push(staged, tensors(model), version)
        assert [receipt.digest for receipt in receipts] == [served_digest(tensors(model))] * 2
        for prompt, completion in zip(PROMPTS, sample(staged, PROMPTS), strict=True):
            assert set(completion.weight_versions) == {version}
            assert gap(model, prompt, completion) < 1e-4


@pytest.mark.parametrize("stage", [0, 1])
def test_a_tensor_that_is_not_sent_is_named_by_the_stage_that_holds_it(staged, models, push, sample, gap, stage):
    left_out = f"model.layers.{stage}.self_attn.k_proj.weight"
    sent = [(name, tensor) for name, tensor in tensors(models[1]) if name != left_out]
    with pytest.raises(WeightSyncError, match=rf"worker {stage}: .*not sent: {left_out}") as caught:
        push(staged, sent, 3)
    assert f"worker {1 - stage}" not in str(caught.value)
    assert staged.weight_version == -1
    push(staged, tensors(models[1]), 4)
    assert gap(models[1], PROMPTS[0], sample(staged, PROMPTS)[0]) < 1e-4


def test_an_adapter_on_the_layers_of_all_stages_gives_what_merging_gives(staged, models, push, sample, gap):
    push(staged, tensors(models[0]), 5)
    for version, seed in ((6, 0), (7, 1)):
        given = adapter(models[0], seed)
        receipts = push(staged, list(given.items()), version, AdapterTensors("policy", CONFIG))
        assert [receipt.digest for receipt in receipts] == [served_digest(given.items())] * 2
        for prompt, completion in zip(PROMPTS, sample(staged, PROMPTS), strict=True):
            assert gap(merged(models[0], given), prompt, completion) < 1e-4
            assert gap(models[0], prompt, completion) > 0.05


def test_an_adapter_on_a_layer_that_no_stage_has_is_refused(staged, models, push):
    push(staged, tensors(models[0]), 8)
    with pytest.raises(WeightSyncError, match=r"layers\.9.* not in the model"):
        push(staged, list(adapter(models[0], 0, layer=9).items()), 9, AdapterTensors("policy", CONFIG))
