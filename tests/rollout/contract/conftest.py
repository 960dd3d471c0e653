"""The engines that the contract is checked against. A new engine is one more entry of `ENGINES`."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest

from hone.rollout.base import RolloutEngine
from hone.rollout.builtin import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import SamplingParams

ENGINES = {
    "builtin-fused": lambda model, tokenizer: BuiltinEngine(BuiltinSettings(execution="fused"), model, tokenizer),
    "builtin-generic": lambda model, tokenizer: BuiltinEngine(BuiltinSettings(execution="generic"), model, tokenizer),
    "builtin-few-slots": lambda model, tokenizer: BuiltinEngine(BuiltinSettings(slots=3), model, tokenizer),
}


@dataclass
class Bench:
    """One engine under test, beside the model whose weights it serves and another of the same shape."""

    engine: RolloutEngine
    model: Any
    other_model: Any
    tokenizer: Any
    tolerance: float = 1e-5  # of log-probs against transformers, float32

    def prompts(self, number, longest=24):
        draw = random.Random(0)
        lengths = [1, longest, *(draw.randint(1, longest) for _ in range(number - 2))][:number]
        return [tuple(draw.randrange(8, 104) for _ in range(length)) for length in lengths]

    async def all(self, prompts, tag="r", **sampling):
        """Every prompt at once; request i has seed i unless `seed` is given."""
        wanted = {"max_tokens": 16, "ignore_eos": True, **sampling}
        return await asyncio.gather(
            *(
                self.engine.generate(f"{tag}{i}", prompt, SamplingParams(**{"seed": i, **wanted}))
                for i, prompt in enumerate(prompts)
            )
        )

    async def let_run(self, turns=6):
        """Give the engine time for a few tokens, and not for all."""
        for _ in range(turns):
            await asyncio.sleep(0)

    def weights(self, model):
        return list(model.state_dict().items())


@pytest.fixture(params=sorted(ENGINES))
def bench(request, tiny, tokenizer):
    model = tiny("qwen3", seed=0)
    return Bench(ENGINES[request.param](model, tokenizer), model, tiny("qwen3", seed=1), tokenizer)
