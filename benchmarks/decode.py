"""Decoding by the built-in engine, beside what the memory allows: tokens/s, and the share of a copy's bandwidth.

    python benchmarks/decode.py FOLDER                      # a model folder, for example of gpu_kit/material.py
    python benchmarks/decode.py FOLDER --rows 1,64 --short 8 --long 24
    python benchmarks/decode.py FOLDER --execution fused    # without graphs on a GPU, which `auto` replays there

A decode step reads every weight once (the embedding only where it is also the head), and the keys and
values of every token so far. The floor of a step is those bytes over the bandwidth of a copy within the device
(bytes read plus bytes written, measured here). A step's time is the difference between answers of `--long` and of
`--short` tokens, so prefills and set-up do not count; each is the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import torch

from hone.models.loading import load_language_model
from hone.models.settings import ModelConfig
from hone.platforms.base import PlatformBase, compute_dtype, current_platform
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams

PROMPT_TOKENS = 64


def copy_bandwidth(platform: PlatformBase, size: int) -> float:
    """Bytes per second that a copy of `size` bytes within the device reads and writes."""
    one = torch.empty(size, dtype=torch.uint8, device=platform.torch_device()).fill_(1)
    other, seconds = torch.empty_like(one), []
    for _ in range(6):
        platform.synchronize()
        started = time.perf_counter()
        other.copy_(one)
        platform.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * size / min(seconds[1:])


def bytes_of_a_step(engine: BuiltinEngine, rows: int, columns: float) -> float:
    """Return the bytes that a step of so many rows reads, each with so many tokens."""
    weights = {one.data_ptr(): one.nbytes for one in engine.weights().values()}
    embedding, head = (engine.weights()[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    looked_up = 0 if embedding.data_ptr() == head.data_ptr() else embedding.nbytes
    (shape,) = engine._decoder.cache_shapes
    per_token = shape.layers * shape.kv_heads * (shape.key_size + shape.value_size) * embedding.itemsize
    return sum(weights.values()) - looked_up + rows * columns * per_token


async def answer(engine: BuiltinEngine, rows: int, tokens: int) -> float:
    """Seconds for answers of so many tokens."""
    sampling = [SamplingParams(max_tokens=tokens, seed=row, ignore_eos=True) for row in range(rows)]
    prompts = [tuple(2 + (row + at) % 1000 for at in range(PROMPT_TOKENS)) for row in range(rows)]
    started = time.perf_counter()
    await asyncio.gather(
        *(engine.generate(GenerationRequest(str(row), prompts[row], one)) for row, one in enumerate(sampling)),
    )
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1,8,64,256", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--short", type=int, default=32)
    parser.add_argument("--long", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copy-mib", type=int, default=2048)
    parser.add_argument("--execution", default="auto", help="as rollout.builtin.execution")
    args = parser.parse_args()
    platform = current_platform()
    dtype = compute_dtype("auto", platform)
    model = load_language_model(ModelConfig(path=str(args.folder), dtype=dtype))
    longest = PROMPT_TOKENS + args.long
    settings = BuiltinSettings(dtype=dtype, slots=max(args.rows), max_sequence_tokens=longest, execution=args.execution)
    engine = BuiltinEngine(settings, model, device=platform.torch_device())
    bandwidth = copy_bandwidth(platform, args.copy_mib << 20)
    print(f"{platform.device_name()}, {dtype}: a copy moves {bandwidth / 1e9:.1f} GB/s", flush=True)
    for rows in args.rows:
        seconds = {}
        for tokens in (args.short, args.long):
            seconds[tokens] = min(asyncio.run(answer(engine, rows, tokens)) for _ in range(args.rounds))
        step = (seconds[args.long] - seconds[args.short]) / (args.long - args.short)
        moved = bytes_of_a_step(engine, rows, PROMPT_TOKENS + (args.short + args.long) / 2)
        figures = {
            "rows": rows,
            "ms_per_step": round(step * 1e3, 3),
            "tokens_per_s": round(rows / step, 1),
            "floor_ms": round(moved / bandwidth * 1e3, 3),
            "of_roofline": round(moved / bandwidth / step, 3),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
