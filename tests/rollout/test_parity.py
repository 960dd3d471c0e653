"""The built-in engine against the plain transformers forward, and its two execution paths against each other."""

import asyncio

import numpy as np
import pytest
import torch

from hone.rollout.builtin.decoder import build_decoder
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.fused import FusedDecoder, unfit_for_fusing
from hone.rollout.builtin.generic import GenericDecoder
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams
from hone.weights.digests.digest import digest_tensors

FAMILY = ["qwen3", "qwen2", "llama", "llama_yarn", "mistral"]
OTHERS = ["qwen3_moe", "mistral_window", "gemma2", "gpt_oss", "gpt2"]
PROMPTS = [tuple(range(10, 10 + n)) for n in (1, 3, 12, 30, 12)]


async def generate(engine, prompts, **sampling):
    wanted = {"max_tokens": 20, "ignore_eos": True, **sampling}
    return await asyncio.gather(
        *(
            engine.generate(GenerationRequest(str(i), prompt, SamplingParams(**{"seed": i, **wanted})))
            for i, prompt in enumerate(prompts)
        )
    )


@pytest.mark.parametrize(
    ("kind", "path"), [*((k, p) for k in FAMILY for p in ("fused", "generic")), *((k, "auto") for k in OTHERS)]
)
def test_logprobs_equal_the_plain_forward(kind, path, tiny, finish, gap):
    """Prompts of several lengths, two of them equal, fewer slots than requests; windows shorter than the prompts."""
    model = tiny(kind)
    engine = BuiltinEngine(BuiltinSettings(execution=path, slots=4), model)
    for prompt, completion in zip(PROMPTS, finish(generate(engine, PROMPTS)), strict=True):
        assert gap(model, prompt, completion) < 1e-5


@pytest.mark.parametrize("kind", FAMILY)
def test_both_paths_prefill_and_decode_alike(kind, tiny):
    """The same caches and the same logits, one forward at a time."""
    from hone.rollout.builtin.cache import CacheLimits, KVCache, PackedPrompts, Step

    model, device = tiny(kind), torch.device("cpu")
    found = []
    for path in ("fused", "generic"):
        decoder = build_decoder(path, model.config, torch.float32, device, longest=128)
        assert isinstance(decoder, {"fused": FusedDecoder, "generic": GenericDecoder}[path])
        for name, tensor in model.state_dict().items():
            decoder.weights()[name].copy_(tensor)
        assert decoder.weights().keys() == model.state_dict().keys()
        cache = KVCache(decoder.cache_shapes, CacheLimits(8, 1024), torch.float32, device)
        with torch.inference_mode():
            cache.reserve(3, 64, live_rows=0)
            decoder.prefill(PackedPrompts.of([(5, 6, 7), tuple(range(10, 30))], [2, 0], device), cache)
            step = Step.of(np.array([40, 41, 42]), np.array([20, 0, 3]), np.zeros(3, np.int64), cache)
            logits = decoder.decode(step, cache)
        found.append((*cache.keys, *cache.values, logits))
    for one, two in zip(*found, strict=True):
        assert one.abs().max() > 0.1
        assert torch.allclose(one, two, atol=1e-5)


def test_auto_takes_the_fused_path_where_it_is_exact(tiny):
    for kind in FAMILY:
        assert unfit_for_fusing(tiny.config(kind), 128) == ""
    reasons = {kind: unfit_for_fusing(tiny.config(kind), 128) for kind in OTHERS}
    assert "qwen3_moe" in reasons["qwen3_moe"]
    assert "sliding window of 8" in reasons["mistral_window"]
    assert unfit_for_fusing(tiny.config("mistral_window"), 8) == ""
    assert all(reasons.values())


def test_what_cannot_be_run_exactly_is_refused(tiny):
    from transformers import BloomConfig, LlamaConfig, RwkvConfig

    with pytest.raises(ValueError, match=r"'fused' cannot run this model.*qwen3_moe"):
        BuiltinEngine(BuiltinSettings(execution="fused"), tiny.config("qwen3_moe"))
    with pytest.raises(ValueError, match="cannot run RwkvForCausalLM"):
        BuiltinEngine(BuiltinSettings(), RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="cannot run BloomForCausalLM"):
        BuiltinEngine(BuiltinSettings(), BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, max_position_embeddings=64, rope_parameters=dynamic)
    with pytest.raises(ValueError, match=r"max_sequence_tokens=65 .* context of 64 tokens; set model\.use\.context"):
        BuiltinEngine(BuiltinSettings(max_sequence_tokens=65), config)


@pytest.mark.parametrize("path", ["fused", "generic"])
def test_bfloat16_is_served_as_such(path, tiny, finish, gap):
    model = tiny("qwen3", dtype=torch.bfloat16)
    engine = BuiltinEngine(BuiltinSettings(execution=path), model)
    assert {dtype for dtype, _ in engine.expected_weights().values()} == {torch.bfloat16}
    for prompt, completion in zip(PROMPTS, finish(generate(engine, PROMPTS)), strict=True):
        assert gap(model, prompt, completion) < 0.1  # a wrong token or position gives 0.5 and more


def test_the_engine_casts_to_its_own_dtype(tiny, finish):
    """float32 weights sent to a bfloat16 engine: it serves the cast weights."""
    model = tiny("qwen3")
    engine = BuiltinEngine(BuiltinSettings(dtype="bfloat16"), model.config)
    served = finish(engine.update_weights(model.state_dict().items(), 1))
    assert digest_tensors(served.tensors.items()) == digest_tensors(
        (n, t.bfloat16()) for n, t in model.state_dict().items()
    )


@pytest.mark.parametrize("execution", ["fused", "generic"])
def test_what_is_written_into_its_storage_is_served(execution, tiny, finish, gap):
    """As a server has weights written as they come; then the very tensors are handed over."""
    model, other = tiny("qwen3"), tiny("qwen3", seed=1)
    engine = BuiltinEngine(BuiltinSettings(execution=execution), model)
    targets = engine.weights()
    assert engine.weights()["model.norm.weight"] is targets["model.norm.weight"]

    def written():
        for name, tensor in other.state_dict().items():
            targets[name].copy_(tensor)
            yield name, targets[name]

    served = finish(engine.update_weights(written(), 1))
    assert digest_tensors(served.tensors.items()) == digest_tensors(other.state_dict().items())
    for prompt, completion in zip(PROMPTS, finish(generate(engine, PROMPTS)), strict=True):
        assert gap(other, prompt, completion) < 1e-5


def test_rows_do_not_depend_on_their_company_to_the_bit(tiny, finish):
    """What makes runs repeat exactly though completions arrive at other times; see `hone.rollout.builtin.cache`."""
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))
    together = finish(generate(engine, PROMPTS * 8))
    for i in (0, 1, 3):
        (alone,) = finish(generate(engine, PROMPTS[i : i + 1], seed=i))
        assert (alone.token_ids, alone.logprobs) == (together[i].token_ids, together[i].logprobs)
