"""A server of a mixture whose ranks have requests and KV caches of their own, and share the experts (data parallel)."""

import pytest

from hone.weights.base import WeightSyncError
from tests.rollout.receipts import served_digest
from tests.rollout.servers.test_pair import PROMPTS

pytestmark = pytest.mark.vllm

LEFT_OUT = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def spread(real_adapter, runner):
    server = real_adapter("vllm", 3, engine={"data_parallel_size": 2}, kind="qwen3_moe_wide")
    runner.run(server.start())
    yield server
    runner.run(server.close())


@pytest.fixture(scope="module")
def mixtures(tiny):
    return tiny("qwen3_moe_wide", seed=0), tiny("qwen3_moe_wide", seed=1)


def tensors(model):
    return list(model.state_dict().items())


def test_every_rank_proves_all_weights_and_the_server_samples_from_them(spread, mixtures, push, sample, gap):
    assert spread.ranks == 2
    for version, model in enumerate(mixtures):
        receipts = push(spread, tensors(model), version)
        assert [receipt.digest for receipt in receipts] == [served_digest(tensors(model))] * 2
        for prompt, completion in zip(PROMPTS * 4, sample(spread, PROMPTS * 4), strict=True):
            assert set(completion.weight_versions) == {version}
            assert gap(model, prompt, completion) < 1e-4


def test_experts_that_are_not_sent_are_named_by_every_rank(spread, mixtures, push, sample, gap):
    sent = [(name, tensor) for name, tensor in tensors(mixtures[1]) if name != LEFT_OUT]
    assert len(sent) < len(tensors(mixtures[1]))
    with pytest.raises(WeightSyncError, match=r"worker 0: .*not sent: .*experts.*worker 1: .*not sent: .*experts"):
        push(spread, sent, 3)
    assert spread.weight_version == -1
    push(spread, tensors(mixtures[1]), 4)
    assert gap(mixtures[1], PROMPTS[0], sample(spread, PROMPTS)[0]) < 1e-4
