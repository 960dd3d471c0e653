"""Decode steps that read each row of the KV cache as far as it is filled: by FlashAttention, with a row for a page.

On a CPU the calls reach `flash_on_cpu`, which computes what the kernels do and checks what they require.
"""

import asyncio

import numpy as np
import pytest
import torch

from hone.models.attention import varlen
from hone.models.attention.packed import Scoring
from hone.platforms import PLATFORMS
from hone.platforms.base import PLATFORM_VARIABLE, PlatformRegistry, current_platform
from hone.registry import Registry
from hone.rollout.builtin.cache import CacheLimits, CacheShape, KVCache, Step
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import SamplingParams
from tests.models import flash_on_cpu as kernels
from tests.models.flash_on_cpu import flash_on_cpu
from tests.rollout.tracing import TracingCpu

SHAPE = CacheShape(layers=2, kv_heads=2, key_size=16, value_size=16)
LIMITS = CacheLimits(rows=64, tokens=1 << 14)
LENGTHS = [1, 3, 12, 30, 12, 100, 7, 45, 2, 63, 9, 61, 17, 33, 21, 4, 8, 70]
PROMPTS = [tuple(10 + i % 90 for i in range(n)) for n in LENGTHS]


class CachedCpu(TracingCpu):
    """A CPU whose FlashAttention reads KV caches."""

    attention_kernels = ("varlen", "cached", "sdpa")


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr("hone.platforms.base.PLATFORMS", Registry("platform", base=PLATFORMS))
        PlatformRegistry.register(platform="cached")(CachedCpu)
        monkeypatch.setenv(PLATFORM_VARIABLE, "cached")
        with flash_on_cpu() as forwards:
            yield "cpu"
        assert forwards, "another kernel was chosen"
        return
    platform = current_platform()
    if not (varlen.has_kernel(platform.device) and varlen.reads_caches(platform.device)):
        pytest.skip(f"no FlashAttention reads KV caches on {platform.name} with torch {torch.__version__}")
    yield platform.device


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("heads", [2, 8])
def test_a_step_equals_one_with_a_mask(heads, window, device):
    """Rows that are empty but for one column, that end a page, and that reach into the next; garbage beyond."""
    positions = np.array([0, 5, 255, 256, 300])
    ragged = KVCache(SHAPE, LIMITS, torch.bfloat16, torch.device(device))
    masked = KVCache(SHAPE, LIMITS, torch.float32, torch.device("cpu"))
    assert (ragged.column_step, masked.column_step) == (256, 16)
    queries = torch.randn(len(positions), heads, 16).bfloat16()
    for cache in (ragged, masked):
        cache.reserve(7, 512, live_rows=0)
    for stored, exact in ((ragged.keys, masked.keys), (ragged.values, masked.values)):
        exact.copy_(torch.randn(exact.shape).bfloat16())
        stored.copy_(exact)
        for row, position in enumerate(positions):
            stored[:, row, :, position + 1 :] = float("nan")
    found, expected = (
        cache.attend(
            1,
            queries.to(cache.keys),
            Step.of(np.zeros_like(positions), positions, np.zeros_like(positions), cache),
            Scoring(0.3, window),
        )
        for cache in (ragged, masked)
    )
    assert found.shape == expected.shape == (len(positions), heads * 16)
    assert (found.cpu().float() - expected).norm() < 0.01 * expected.norm()


def test_repeatable_steps_do_not_split_keys_where_a_newer_version_lets_them(device):
    """Version 2 has no such argument; `flash_on_cpu` refuses it."""
    cache = KVCache(SHAPE, LIMITS, torch.bfloat16, torch.device(device))
    cache.reserve(3, 256, live_rows=0)
    step = Step.of(np.zeros(3, int), np.array([4, 0, 9]), np.zeros(3, int), cache)
    torch.use_deterministic_algorithms(True)
    try:
        out = cache.attend(0, torch.ones(3, 2, 16, dtype=torch.bfloat16, device=device), step, Scoring(0.3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("execution", "kind"),
    [("fused", "qwen3"), ("generic", "qwen3"), ("generic", "mistral_window"), ("graphed", "qwen3")],
)
def test_an_engine_gives_the_log_probs_of_the_plain_forward(execution, kind, device, tiny, finish, gap, monkeypatch):
    """Requests come and go, prompts are shared, and the cache grows by pages, which are smaller here."""
    if device == "cpu":
        monkeypatch.setattr(varlen, "PAGE", 32)
        monkeypatch.setattr(kernels, "PAGE", 32)
    model = tiny(kind)
    settings = BuiltinSettings(execution=execution, slots=6, dtype="bfloat16", kv_cache_tokens=6 * 256)
    engine = BuiltinEngine(settings, model, device=device)

    async def answers():
        wanted = [SamplingParams(max_tokens=5 + 3 * i % 23, ignore_eos=True, seed=i) for i in range(len(PROMPTS))]
        return await asyncio.gather(
            *(engine.generate(str(i), prompt, one) for i, (prompt, one) in enumerate(zip(PROMPTS, wanted, strict=True)))
        )

    for prompt, completion in zip(PROMPTS, finish(answers()), strict=True):
        assert gap(model, prompt, completion) < 0.1
    cache = engine._scheduler.batch.cache
    assert cache.columns == (128 if device == "cpu" else 256)
    assert cache.rows * cache.columns <= settings.kv_cache_tokens
