"""Decode steps that read each row of the KV cache as far as it is filled: by FlashAttention 3, with a row for a page.

On a CPU the calls reach `flash_on_cpu`, which computes what the kernel does and checks what it requires.
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
from hone.types import GenerationRequest, SamplingParams
from tests.models.flash_on_cpu import version_on_cpu
from tests.rollout.tracing import TracingCpu

pytestmark = pytest.mark.skipif(not varlen.PAGES, reason="this torch's varlen_attn reads no pages")
SHAPE = CacheShape(layers=2, kv_heads=2, key_size=16, value_size=16)
LIMITS = CacheLimits(rows=64, tokens=1 << 14)
LENGTHS = [1, 3, 12, 30, 12, 100, 7, 45, 2, 63, 9, 61, 17, 33, 21, 4, 8, 70]
PROMPTS = [tuple(10 + i % 90 for i in range(n)) for n in LENGTHS]


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr("hone.platforms.base.PLATFORMS", Registry("platform", base=PLATFORMS))
        PlatformRegistry.register(platform="tracing")(TracingCpu)
        monkeypatch.setenv(PLATFORM_VARIABLE, "tracing")
        with version_on_cpu(monkeypatch, "FA3") as activated:
            yield "cpu"
            assert any("block_table" in one for one in activated[0][1:]), "another kernel was chosen"
        return
    platform = current_platform()
    device = platform.torch_device() if platform.device != "cpu" else torch.device("cpu")
    if not (varlen.fits(torch.bfloat16, device, 16, 16) and varlen.reads_caches(device, torch.bfloat16)):
        pytest.skip(f"no FlashAttention reads KV caches on {platform.name}: see HONE_FLASH_ATTENTION")
    yield platform.device


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("heads", [2, 8])
def test_a_step_equals_one_with_a_mask(heads, window, device):
    """Rows with one column, and with many; garbage beyond."""
    positions = np.array([0, 5, 255, 256, 300])
    ragged = KVCache((SHAPE,), LIMITS, torch.bfloat16, torch.device(device))
    masked = KVCache((SHAPE,), LIMITS, torch.float32, torch.device("cpu"))
    queries = torch.randn(len(positions), heads, 16).bfloat16()
    for cache in (ragged, masked):
        cache.reserve(7, 512, live_rows=0)
    for stored, exact in zip((*ragged.keys, *ragged.values), (*masked.keys, *masked.values), strict=True):
        exact.copy_(torch.randn(exact.shape).bfloat16())
        stored.copy_(exact)
        for row, position in enumerate(positions):
            stored[:, row, :, position + 1 :] = float("nan")
    found, expected = (
        cache.attend(
            1,
            queries.to(cache.keys[0]),
            Step.of(np.zeros_like(positions), positions, np.zeros_like(positions), cache),
            Scoring(0.3, window),
        )
        for cache in (ragged, masked)
    )
    assert found.shape == expected.shape == (len(positions), heads * 16)
    assert (found.cpu().float() - expected).norm() < 0.01 * expected.norm()


def test_repeatable_steps_do_not_split_keys(monkeypatch):
    with version_on_cpu(monkeypatch, "FA3") as activated:
        cache = KVCache((SHAPE,), LIMITS, torch.bfloat16, torch.device("cpu"))
        cache.reserve(3, 64, live_rows=0)
        step = Step.of(np.zeros(3, int), np.array([4, 0, 9]), np.zeros(3, int), cache)
        for repeatable in (False, True):
            torch.use_deterministic_algorithms(repeatable)
            cache.attend(0, torch.ones(3, 2, 16, dtype=torch.bfloat16), step, Scoring(0.3))
        torch.use_deterministic_algorithms(False)
    (forwards,) = activated
    assert [one.get("num_splits") for one in forwards[-2:]] == [None, 1]


@pytest.mark.parametrize(
    ("execution", "kind"),
    [("fused", "qwen3"), ("generic", "qwen3"), ("generic", "mistral_window"), ("graphed", "qwen3")],
)
def test_an_engine_gives_the_log_probs_of_the_plain_forward(execution, kind, device, tiny, finish, gap):
    """Requests come and go, prompts are shared, and the cache grows."""
    model = tiny(kind)
    settings = BuiltinSettings(execution=execution, slots=6, dtype="bfloat16")
    engine = BuiltinEngine(settings, model, device=device)

    async def answers():
        wanted = [SamplingParams(max_tokens=5 + 3 * i % 23, ignore_eos=True, seed=i) for i in range(len(PROMPTS))]
        return await asyncio.gather(
            *(
                engine.generate(GenerationRequest(str(i), prompt, one))
                for i, (prompt, one) in enumerate(zip(PROMPTS, wanted, strict=True))
            )
        )

    for prompt, completion in zip(PROMPTS, finish(answers()), strict=True):
        assert gap(model, prompt, completion) < 0.1
