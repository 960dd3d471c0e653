"""SGLang on two ranks, each with requests and a KV cache of its own (data parallel attention)."""

import pytest

from hone.weights.base import WeightSyncError
from tests.rollout.receipts import served_digest
from tests.rollout.servers.test_pair import PROMPTS

pytestmark = pytest.mark.sglang

LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def spread(real_adapter, runner):
    server = real_adapter("sglang", 3, engine={"attn_dp_size": 2}, tensor_parallel=2)
    runner.run(server.start())
    yield server
    runner.run(server.close())


@pytest.fixture(scope="module")
def models(tiny):
    return tiny("qwen3", seed=0), tiny("qwen3", seed=1)


def tensors(model):
    return list(model.state_dict().items())


def test_every_rank_proves_all_weights_and_the_server_samples_from_them(spread, models, push, sample, gap):
    for version, model in enumerate(models):
        receipts = push(spread, tensors(model), version)
        assert [receipt.digest for receipt in receipts] == [served_digest(tensors(model))] * 2
        for prompt, completion in zip(PROMPTS * 4, sample(spread, PROMPTS * 4), strict=True):
            assert set(completion.weight_versions) == {version}
            assert gap(model, prompt, completion) < 1e-4


def test_what_is_not_sent_is_named_by_every_rank(spread, models, push, sample, gap):
    sent = [(name, tensor) for name, tensor in tensors(models[1]) if name != LEFT_OUT]
    assert len(sent) < len(tensors(models[1]))
    with pytest.raises(WeightSyncError, match=rf"worker 0: .*not sent: {LEFT_OUT}.*worker 1: .*not sent: {LEFT_OUT}"):
        push(spread, sent, 3)
    assert spread.weight_version == -1
    push(spread, tensors(models[1]), 4)
    assert gap(models[1], PROMPTS[0], sample(spread, PROMPTS)[0]) < 1e-4
