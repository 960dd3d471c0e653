"""The built-in rollout engine against `transformers.generate`: same model, prompts and token counts.

    python benchmarks/rollout.py                      # both dtypes, uniform and ragged lengths, 2 threads
    python benchmarks/rollout.py --dtype bfloat16 --rounds 2 --threads 1

Both take turns within one process; of each, the round with the least wall time counts (process time beside it: the two
together show whether something else used the machine). A ratio above 1 means that the engine is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from hone.rollout.builtin import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import SamplingParams

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 32, 64


@dataclass(frozen=True)
class Timing:
    """The fastest round."""

    wall_s: float
    process_s: float


def build(dtype: torch.dtype) -> PreTrainedModel:
    """10 M parameters."""
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def lengths_of(kind: str) -> list[int]:
    """New tokens of each sequence: all the maximum, or geometric with a mean of a quarter of it, cut at the maximum."""
    if kind == "uniform":
        return [NEW_TOKENS] * (PROMPTS * SAMPLES)
    drawn = np.random.default_rng(0).geometric(4 / NEW_TOKENS, PROMPTS * SAMPLES)
    return np.minimum(drawn, NEW_TOKENS).tolist()


def with_generate(model: PreTrainedModel, prompts: torch.Tensor, lengths: list[int]) -> Callable[[], None]:
    """`generate` runs every row to the longest one; what is beyond a row's length is thrown away."""

    def run() -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
        )

    return run


def with_engine(engine: BuiltinEngine, prompts: torch.Tensor, lengths: list[int]) -> Callable[[], None]:
    async def all_requests() -> None:
        await asyncio.gather(
            *(
                engine.generate(str(i), tuple(prompt), SamplingParams(max_tokens=length, seed=i, ignore_eos=True))
                for i, (prompt, length) in enumerate(zip(prompts.tolist(), lengths, strict=True))
            )
        )

    return lambda: asyncio.run(all_requests())


def race(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, Timing]:
    timings: dict[str, list[Timing]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            wall, process = time.perf_counter(), time.process_time()
            run()
            timing = Timing(time.perf_counter() - wall, time.process_time() - process)
            if number:  # the first round warms up
                timings[name].append(timing)
    return {name: min(found, key=lambda t: t.wall_s) for name, found in timings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--lengths", choices=["uniform", "ragged"], action="append")
    parser.add_argument("--execution", choices=["fused", "generic"], action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens x {SAMPLES} samples, {arguments.threads} threads")
    for dtype in arguments.dtype or ["float32", "bfloat16"]:
        model = build(getattr(torch, dtype))
        prompts = torch.randint(3, 2048, (PROMPTS, PROMPT_TOKENS)).repeat_interleave(SAMPLES, 0)
        engines = {
            f"hone {path}": BuiltinEngine(BuiltinSettings(execution=path), model)
            for path in arguments.execution or ["fused", "generic"]
        }
        for kind in arguments.lengths or ["uniform", "ragged"]:
            lengths = lengths_of(kind)
            contestants = {"generate": with_generate(model, prompts, lengths)}
            contestants |= {name: with_engine(engine, prompts, lengths) for name, engine in engines.items()}
            timings = race(contestants, arguments.rounds)
            for name, timing in timings.items():
                first = timings["generate"]
                print(
                    f"{dtype:8} {kind:7} {name:12} {sum(lengths) / timing.wall_s:7.0f} tokens/s"
                    f"  wall {timing.wall_s:6.3f} s  process {timing.process_s:6.3f} s"
                    f"  ratio {first.wall_s / timing.wall_s:.2f} (process {first.process_s / timing.process_s:.2f})"
                )


if __name__ == "__main__":
    main()
