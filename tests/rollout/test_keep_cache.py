"""`keep_cache`: answers go on under new weights with the KV of the old ones, and nobody else ever uses that KV."""

import asyncio
from dataclasses import replace

import pytest
import torch

from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams

WANTED = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)
PROMPT = (9, 10, 11)


@pytest.fixture
def found(tiny, finish):
    """An answer that new weights reach after five tokens, and one to the same prompt that begins afterwards."""
    old, new = tiny("qwen3"), tiny("qwen3", seed=1)
    engine = BuiltinEngine(BuiltinSettings(), old)
    engine.keep_cache = True

    async def story():
        running = asyncio.create_task(engine.generate(GenerationRequest("running", PROMPT, WANTED)))
        while engine._scheduler.batch.counters.tokens < 5:
            await asyncio.sleep(0)
        await engine.update_weights(new.state_dict().items(), 1)
        fresh = await engine.generate(GenerationRequest("fresh", PROMPT, replace(WANTED, seed=4)))
        return await running, fresh, engine.metrics()["rollout/recomputed_tokens"].value

    return old, new, *finish(story())


def forward(model, completion):
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(-1)
    return [scores[len(PROMPT) - 1 + at, token].item() for at, token in enumerate(completion.token_ids)]


def test_each_token_has_the_version_it_was_sampled_from_and_nothing_is_computed_again(found):
    old, new, running, _, recomputed = found
    assert running.weight_versions == (0,) * 5 + (1,) * 15
    assert recomputed == 0
    assert running.logprobs[:5] == pytest.approx(forward(old, running)[:5], abs=1e-5)
    assert running.logprobs[5:] != pytest.approx(forward(new, running)[5:], abs=1e-3), "its KV is of both"


def test_a_new_prompt_never_uses_the_kv_of_older_weights(found):
    _, new, _, fresh, _ = found
    assert set(fresh.weight_versions) == {1}
    assert list(fresh.logprobs) == pytest.approx(forward(new, fresh), abs=1e-5)
