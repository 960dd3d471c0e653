"""Decode steps that are recorded and replayed: on a GPU as CUDA graphs, on a CPU as traces of torch's operations.

A trace repeats exactly the operations that ran while it was made, over the tensors that they read and wrote then. So
what a step decides on the host shows here too: it would stay as it was at the recording.
"""

import asyncio

import numpy as np
import pytest
import torch

from hone.platforms import PLATFORMS
from hone.platforms.base import PLATFORM_VARIABLE, PlatformRegistry, current_platform
from hone.registry import Registry
from hone.rollout.builtin import graphs
from hone.rollout.builtin.cache import CacheLimits, KVCache, Step
from hone.rollout.builtin.decoder import build_decoder
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.fused import FusedDecoder
from hone.rollout.builtin.generic import GenericDecoder
from hone.rollout.builtin.graphs import GraphedDecoder, bucket
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams
from tests.rollout.tracing import TracingCpu

FAMILY = ["qwen3", "qwen2", "llama_yarn"]
LENGTHS = [1, 3, 12, 30, 12, 100, 7, 45, 2, 5, 9, 61, 17, 33, 21, 4, 8, 70]
PROMPTS = [tuple(10 + i % 90 for i in range(n)) for n in LENGTHS]


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device that records graphs; its platform is the process's."""
    if request.param == "cpu":
        monkeypatch.setattr("hone.platforms.base.PLATFORMS", Registry("platform", base=PLATFORMS))
        PlatformRegistry.register(platform="tracing")(TracingCpu)
        monkeypatch.setenv(PLATFORM_VARIABLE, "tracing")
    elif current_platform().device == "cpu":
        pytest.skip("there is no accelerator here")
    return current_platform().device


def loaded(model, device, dtype=torch.float32, graphed=True):
    decoder = build_decoder("graphed" if graphed else "fused", model.config, dtype, torch.device(device), longest=128)
    for name, tensor in model.state_dict().items():
        decoder.weights()[name].copy_(tensor)
    return decoder


def new_cache(decoder, device, dtype=torch.float32):
    return KVCache(decoder.cache_shapes, CacheLimits(64, 1 << 13), dtype, torch.device(device))


def sizes(cache):
    return [key for key in cache.bound if key != "logits"]


def decoded(decoder, cache, steps):
    """Logits of each step; (tokens, positions) of its rows."""
    with torch.inference_mode():
        return [
            decoder.decode(Step.of(np.array(tokens), np.array(positions), np.zeros_like(tokens), cache), cache).clone()
            for tokens, positions in steps
        ]


def test_sizes_are_rounded_up_by_less_than_a_quarter():
    assert [bucket(n, 16) for n in (1, 16, 17, 20, 21, 32, 33, 64, 65, 130)] == [
        16,
        16,
        20,
        20,
        24,
        32,
        40,
        64,
        80,
        160,
    ]
    assert [bucket(n, 128) for n in (1, 128, 129, 256, 257, 1000)] == [128, 128, 160, 256, 320, 1024]
    for fewest in (16, 128):
        sizes = [bucket(n, fewest) for n in range(fewest, 5000)]
        assert all(n <= size < 1.25 * n for n, size in enumerate(sizes, fewest))
        assert len(set(sizes)) < 45


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FAMILY)
def test_a_replayed_step_equals_a_computed_one(kind, dtype, device, tiny):
    """Other tokens, positions and numbers of rows than at the recording, with the KV that earlier steps wrote."""
    model = tiny(kind, dtype=dtype)
    steps = [
        ([5, 6, 7], [0, 0, 0]),
        ([9, 8, 7, 6], [1, 1, 1, 0]),  # one row more
        ([20, 21], [2, 2]),  # two less
        ([22, 23, 24, 25, 26], [3, 3, 0, 0, 0]),  # rows that no request had, which the last replay wrote to
    ]
    found = []
    for graphed in (True, False):
        decoder = loaded(model, device, dtype, graphed)
        cache = new_cache(decoder, device, dtype)
        with torch.inference_mode():
            cache.reserve(20, 128, live_rows=0)
        found.append(decoded(decoder, cache, steps))
        if graphed:
            assert sizes(cache) == [(16, 128)]  # recorded once, replayed by every step
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for (tokens, _), replayed, computed in zip(steps, *found, strict=True):
        assert replayed.shape == computed.shape == (len(tokens), model.config.vocab_size)
        assert torch.allclose(replayed, computed, atol=tolerance)


def test_new_weights_are_what_a_recorded_step_uses(device, tiny):
    decoder = loaded(tiny("qwen3"), device)
    cache = new_cache(decoder, device)
    with torch.inference_mode():
        cache.reserve(16, 128, live_rows=0)
    (old,) = decoded(decoder, cache, [([5], [0])])
    for name, tensor in tiny("qwen3", seed=1).state_dict().items():
        decoder.weights()[name].copy_(tensor)
    (new,) = decoded(decoder, cache, [([5], [0])])
    (expected,) = decoded(loaded(tiny("qwen3", seed=1), device, graphed=False), cache, [([5], [0])])
    assert torch.allclose(new, expected, atol=1e-5)
    assert not torch.allclose(new, old, atol=0.1)


def test_a_cache_that_moved_is_recorded_anew(device, tiny):
    """The old memory is kept alive here and overwritten, so that a graph which still read it would be found."""
    decoder = loaded(tiny("qwen3"), device)
    cache = new_cache(decoder, device)
    with torch.inference_mode():
        cache.reserve(16, 128, live_rows=0)
        decoded(decoder, cache, [([5, 6], [0, 0])])
        old = *cache.keys, *cache.values
        cache.reserve(16, 256, live_rows=16)
        for one in old:
            one.fill_(100.0)
    (found,) = decoded(decoder, cache, [([7, 8], [1, 1])])
    assert sizes(cache) == [(16, 128)]
    plain = loaded(tiny("qwen3"), device, graphed=False)
    fresh = new_cache(plain, device)
    with torch.inference_mode():
        fresh.reserve(16, 128, live_rows=0)
    *_, expected = decoded(plain, fresh, [([5, 6], [0, 0]), ([7, 8], [1, 1])])
    assert torch.allclose(found, expected, atol=1e-5)


async def answers(engine):
    """Requests that come and go: limits differ, so rows are freed and the cache grows."""
    wanted = [{"max_tokens": 5 + 3 * i % 23, "ignore_eos": True, "seed": i} for i in range(len(PROMPTS))]
    return await asyncio.gather(
        *(
            engine.generate(GenerationRequest(str(i), prompt, SamplingParams(**one)))
            for i, (prompt, one) in enumerate(zip(PROMPTS, wanted, strict=True))
        )
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_an_engine_with_graphs_gives_the_log_probs_of_the_plain_forward(dtype, device, tiny, finish, gap, monkeypatch):
    """Also after new weights, and after a sleep that takes the cache away."""
    monkeypatch.setattr(graphs, "FEWEST_COLUMNS", 64)  # so that steps have several sizes
    model, other = tiny("qwen3"), tiny("qwen3", seed=1)
    engine = BuiltinEngine(BuiltinSettings(execution="graphed", dtype=dtype), model, device=device)

    async def run():
        first = await answers(engine)
        cache = engine._scheduler.batch.cache
        assert {rows for rows, _ in sizes(cache)} == {16, 18}  # the cache has 18 rows
        assert {112, 128} < {columns for _, columns in sizes(cache)}
        await engine.sleep(1)
        assert not cache.bound  # graphs keep memory
        await engine.wake_up()
        await engine.update_weights(other.state_dict().items(), 1)
        return first, await answers(engine)

    for served, completions in zip((model, other), finish(run()), strict=True):
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert gap(served, prompt, completion) < (1e-3 if dtype == "float32" else 0.1)


def test_auto_records_graphs_where_the_platform_can(device, tiny):
    longest, where = 128, torch.device(device)
    assert isinstance(build_decoder("auto", tiny("qwen3").config, torch.float32, where, longest), GraphedDecoder)
    assert isinstance(build_decoder("auto", tiny("gpt2").config, torch.float32, where, longest), GenericDecoder)


def test_auto_records_no_graphs_on_a_cpu(tiny, monkeypatch):
    monkeypatch.setenv(PLATFORM_VARIABLE, "cpu")
    found = build_decoder("auto", tiny("qwen3").config, torch.float32, torch.device("cpu"), 128)
    assert isinstance(found, FusedDecoder)


def test_graphs_are_refused_where_they_cannot_be_recorded(tiny, monkeypatch):
    monkeypatch.setenv(PLATFORM_VARIABLE, "cpu")
    reasons = {"qwen3": "the platform cpu records no graphs on cpu", "gpt2": "architecture 'gpt2' is not one of llama"}
    for kind, reason in reasons.items():
        with pytest.raises(ValueError, match=rf"execution 'graphed' cannot run this model: {reason}.*use 'auto'"):
            BuiltinEngine(BuiltinSettings(execution="graphed"), tiny(kind))
