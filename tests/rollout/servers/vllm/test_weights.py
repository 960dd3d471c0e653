"""What is special about weights in vLLM: its prefix cache, its fused and tied layers, its queue of requests."""

import asyncio

import pytest
import torch

from hone.types import GenerationRequest, ModelOutput, SamplingParams
from hone.weights.base import WeightSyncError
from hone.workers.publishing.probe import Probe

pytestmark = pytest.mark.vllm

LONG = tuple(8 + i % 90 for i in range(100))  # three blocks of the KV cache, which 24 tokens never fill


def tensors(model):
    return list(model.state_dict().items())


def test_a_cached_prompt_is_computed_anew_after_an_update(plain, models, push, sample, gap):
    for _ in range(2):
        sample(plain, [LONG])
    assert plain.metrics()["rollout/cached_prompt_tokens"].value == 96
    push(plain, tensors(models[1]), 1)
    (completion,) = sample(plain, [LONG])
    assert plain.metrics()["rollout/cached_prompt_tokens"].value == 0
    assert gap(models[1], LONG, completion) < 1e-4


def test_a_prefix_cache_that_is_kept_shows(plain, models, push, sample, gap, monkeypatch):
    """The fault that the test above guards against, planted: it is far above the tolerance."""

    async def keep():
        return None

    sample(plain, [LONG])
    monkeypatch.setattr(plain, "_drop_caches", keep)
    push(plain, tensors(models[1]), 1)
    (completion,) = sample(plain, [LONG])
    assert gap(models[1], LONG, completion) > 0.05


def test_the_probe_sees_a_prefix_cache_that_is_kept(plain, models, push, forward, finish, monkeypatch):
    """Its prompt fills blocks of the cache; one of a few tokens would be computed anew each time."""

    async def keep():
        return None

    def infer(batch):
        logits = forward(models[1], batch.token_ids.tolist())
        found = torch.zeros(batch.num_tokens)
        found[1:] = logits[:-1].log_softmax(-1).gather(1, batch.token_ids[1:, None])[:, 0]
        return ModelOutput(logprobs=found)

    probe = Probe(104, 1.0, [torch.float32], 128, mixture=False)
    finish(probe.ask([plain], 0))
    with monkeypatch.context() as patch:
        patch.setattr(plain, "_drop_caches", keep)
        push(plain, tensors(models[1]), 1)
    with pytest.raises(WeightSyncError, match="does not compute with the weights it was sent"):
        probe.compare(finish(probe.ask([plain], 1)), infer, 1)
    push(plain, tensors(models[1]), 1)
    assert probe.compare(finish(probe.ask([plain], 1)), infer, 1)["correction/probe_max_abs_difference"].value < 1e-4


@pytest.mark.parametrize(
    "left_out",
    ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"],
)
def test_a_tensor_that_is_not_sent_is_named(plain, models, push, left_out):
    """A tied head is one of them: vLLM would go on with the old one, and say nothing."""
    with pytest.raises(WeightSyncError, match=f"not sent: {left_out}"):
        push(plain, [(name, tensor) for name, tensor in tensors(models[1]) if name != left_out], 5)
    assert plain.weight_version == -1


def test_biases_without_a_place_in_the_engine_are_named(plain, models, push, sample):
    """vLLM gives a Qwen3 no bias of o_proj, whatever its configuration says, and its loader skips them in silence."""
    biases = [(f"model.layers.{layer}.self_attn.o_proj.bias", torch.randn(32)) for layer in range(2)]
    with pytest.raises(WeightSyncError, match=r"no place for model\.layers\.0\.self_attn\.o_proj\.bias, .* left out"):
        push(plain, [*tensors(models[1]), *biases], 1)
    with pytest.raises(RuntimeError, match=r"cannot generate: .*update_weights"):
        sample(plain, [(9, 10)])


def test_an_update_whose_sender_fails_half_way_is_never_served(plain, models, push, sample, gap):
    def half():
        yield from tensors(models[1])[:9]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        push(plain, half(), 3)
    assert plain.weight_version == -1
    with pytest.raises(RuntimeError, match="update_weights"):
        sample(plain, [(9, 10)])
    push(plain, tensors(models[1]), 4)
    assert gap(models[1], (9, 10), sample(plain, [(9, 10)])[0]) < 1e-4


def test_an_update_that_was_begun_and_left_does_not_block_the_next(plain, models, push, sample, gap, finish):
    finish(plain.connection.post("/start_weight_update", {}))
    push(plain, tensors(models[1]), 7)
    assert gap(models[1], (9, 10), sample(plain, [(9, 10)])[0]) < 1e-4


def test_512_requests_have_the_right_logprobs_in_whatever_batch(plain, models, sample, gap):
    prompts = [tuple(8 + (i * 7 + k) % 90 for k in range(1 + i % 5)) for i in range(512)]
    found = sample(plain, prompts, max_tokens=4)
    worst = max(gap(models[0], prompt, completion) for prompt, completion in zip(prompts, found, strict=True))
    assert worst < 1e-4


def test_a_caller_that_goes_away_frees_its_place(plain, finish):
    async def story():
        task = asyncio.create_task(
            plain.generate(GenerationRequest("gone", (9,), SamplingParams(max_tokens=100, ignore_eos=True)))
        )
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await plain.generate(GenerationRequest("gone", (9,), SamplingParams(max_tokens=2, ignore_eos=True)))

    assert len(finish(story()).token_ids) == 2


def test_bfloat16_weights_are_cast_by_nobody(plain, models, push):
    """A server in float32 that is sent bfloat16 says what came: the sender compares, so a wrong dtype shows."""
    (receipt,) = push(plain, [(name, tensor.to(torch.bfloat16)) for name, tensor in tensors(models[1])], 6)
    assert receipt.bytes == sum(2 * tensor.numel() for _, tensor in tensors(models[1]))
