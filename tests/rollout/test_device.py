"""The built-in engine on a device: log-probs of transformers, repeatable answers, memory that sleep gives back.

Every test runs on the CPU too, so that on an accelerator only the device is new.
"""

import asyncio

import numpy as np
import pytest
import torch

from hone.platforms.base import current_platform
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.sampling import Rules, sample, uniforms
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams
from hone.workers.inside.builtin import EngineApp

PROMPTS = [tuple(range(10, 10 + n)) for n in (1, 3, 12, 30, 12)]
ZEROS = np.zeros(512, np.int64)
NEAR = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # a wrong token, position or weight gives 0.4 and more


async def answers(engine, **sampling):
    wanted = {"max_tokens": 20, "ignore_eos": True, **sampling}
    return await asyncio.gather(
        *(
            engine.generate(GenerationRequest(str(i), prompt, SamplingParams(**{"seed": i, **wanted})))
            for i, prompt in enumerate(PROMPTS)
        )
    )


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
@pytest.mark.parametrize(("kind", "path"), [("qwen3_wide", "fused"), ("qwen3_wide", "generic"), ("qwen3_moe", "auto")])
def test_logprobs_equal_the_plain_forward_on_the_cpu(kind, path, dtype, each_device, tiny, finish, gap):
    """Prompts of several lengths, two of them equal, fewer slots than requests."""
    model = tiny(kind)
    engine = BuiltinEngine(BuiltinSettings(execution=path, slots=4, dtype=str(dtype)[6:]), model, device=each_device)
    for prompt, completion in zip(PROMPTS, finish(answers(engine)), strict=True):
        assert gap(model, prompt, completion) < NEAR[dtype]


def test_filters_keep_what_they_should(each_device, tiny, finish):
    """Top-k 1 is greedy, and so is a top-p that nothing but the likeliest token fits."""
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3_wide"), device=each_device)
    greedy, *filtered = (
        [one.token_ids for one in finish(answers(engine, **sampling))]
        for sampling in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0})
    )
    assert filtered == [greedy] * 3


def test_no_token_is_drawn_that_a_filter_excludes(each_device):
    """A GPU adds in another order than a CPU, so its sums may grow where the probability is 0."""
    generator = torch.Generator().manual_seed(0)
    rows = 512
    kept = Rules(*(np.full(rows, value, kind) for value, kind in ((1, "f4"), (50, "i8"), (0.95, "f4"), (0.0, "f4"))))
    for seed in range(8):
        logits = torch.randn(rows, 4096, generator=generator).to(each_device)
        _, logprobs = sample(logits, kept, uniforms(np.arange(rows, dtype=np.uint64) + np.uint64(seed * rows), ZEROS))
        assert logprobs.isfinite().all()


@pytest.mark.usefixtures("deterministic")
def test_the_same_seed_gives_the_same_answer_alone_and_among_others(each_device, tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3_wide"), device=each_device)
    together = finish(answers(engine))
    assert finish(answers(engine)) == together
    alone = finish(
        engine.generate(GenerationRequest("3", PROMPTS[3], SamplingParams(max_tokens=20, ignore_eos=True, seed=3)))
    )
    assert alone.token_ids == together[3].token_ids


def held(engine):
    """Bytes of the engine's weights and KV cache."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in engine.weights().values()}
    return sum(one.nbytes() for one in storages.values()) + engine._scheduler.batch.cache.bytes


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_after_waking_the_answers_are_the_same(level, each_device, tiny, finish):
    model = tiny("qwen3_wide")
    platform = current_platform()
    platform.synchronize()
    start = platform.memory().allocated
    engine = BuiltinEngine(BuiltinSettings(), model, device=each_device)
    before = finish(answers(engine))
    awake, on_device = held(engine), platform.memory().allocated - start
    kv = engine._scheduler.batch.cache.bytes
    finish(engine.sleep(level))
    assert awake > held(engine) == (awake - kv if level == 1 else 0)
    if each_device != "cpu":  # a CPU's figure is the whole process's
        assert on_device >= awake
        assert platform.memory().allocated - start <= on_device - (kv if level == 1 else awake)
    finish(engine.wake_up())
    if level == 2:
        finish(engine.update_weights(model.state_dict().items(), 1))
    after = finish(answers(engine))
    assert [one.token_ids for one in after] == [one.token_ids for one in before]


def test_a_server_that_sleeps_gives_its_memory_to_other_processes(each_device, tiny, finish):
    config = tiny.config("qwen3_wide")
    config.intermediate_size = 1 << 17  # 48 MiB of weights a layer
    engine = BuiltinEngine(BuiltinSettings(dtype="float32"), config, device=each_device)
    finish(engine.update_weights(((name, torch.ones_like(one)) for name, one in engine.weights().items()), 1))
    awake, size = current_platform().memory().reserved, held(engine)
    finish(EngineApp(engine, "token")._sleep({"level": 2}))
    assert size > 40 << 20
    assert awake - current_platform().memory().reserved > 0.9 * size
