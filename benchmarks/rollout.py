"""The rollout engines side by side: same model, prompts and token counts.

    python benchmarks/rollout.py                      # the engine inside against transformers' generate, 128 sequences
    python benchmarks/rollout.py --dtype bfloat16 --rounds 2 --threads 1
    python benchmarks/rollout.py --engines fused,separate,vllm,sglang --concurrent 1,8,64,256 --dtype float32

Engines: `generate` (transformers), `fused` and `generic` (the built-in engine in this process, by its two paths), and
servers in processes of their own: `separate` (the built-in engine), `vllm` and `sglang` (from .venv-vllm and
.venv-sglang, or --python-vllm, --python-sglang). Servers get the weights through a real sync.

All take turns; of each, the round with the least wall time counts (process time beside it: the two together show
whether something else used the machine; of a server it is this side's alone). The ratio is to the first engine named;
above 1 is faster. Ragged lengths are geometric with a mean of a quarter of the longest.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from hone.models.settings import BuildConfig
from hone.models.tokenizer import build_tokenizer
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import Generating, ServerAdapter, ServerSpec
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.servers.builtin import BuiltinServer
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.types import GenerationRequest, SamplingParams
from hone.weights import TRANSPORTS
from hone.weights.sync import CheckpointEngineManager

PROMPT_TOKENS, NEW_TOKENS = 32, 64
SAMPLES = 8  # of each prompt
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"max_num_seqs": 256, "kv_cache_memory_bytes": 2**30},
    "sglang": {"max_running_requests": 256, "max_total_tokens": 65_536},
}


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


def lengths_of(kind: str, number: int) -> list[int]:
    """New tokens of each sequence."""
    if kind == "uniform":
        return [NEW_TOKENS] * number
    drawn = np.random.default_rng(0).geometric(4 / NEW_TOKENS, number)
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


def with_engine(
    engine: Generating, prompts: torch.Tensor, lengths: list[int], runner: asyncio.Runner
) -> Callable[[], None]:
    async def all_requests() -> None:
        found = await asyncio.gather(
            *(
                engine.generate(
                    GenerationRequest(str(i), tuple(prompt), SamplingParams(max_tokens=length, seed=i, ignore_eos=True))
                )
                for i, (prompt, length) in enumerate(zip(prompts.tolist(), lengths, strict=True))
            )
        )
        if [len(one.token_ids) for one in found] != lengths:
            raise SystemExit("an engine gave another number of tokens than was asked for")

    return lambda: runner.run(all_requests())


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


# -------------------------------------------------------------------------------------------------------- servers


def adapter_of(name: str, folder: Path, dtype: str, python: str, token: str) -> ServerAdapter:
    """One server's adapter, not started."""
    backend = "builtin" if name == "separate" else name
    config = RolloutConfig(backend=backend, python=python, engine=OPTIONS.get(name, {}))
    spec = ServerSpec(config, str(folder / "model"), dtype, 0, folder, token)
    adapter: ServerAdapter = BuiltinServer(spec) if name == "separate" else ROLLOUT_ENGINES.get(name)(spec)
    return adapter


async def push(server: ServerAdapter, model: PreTrainedModel, token: str) -> None:
    """Version 0 of the weights, through shared memory, proven."""
    sender = TRANSPORTS.get("ipc")(64 << 20, 300.0, token)
    manager = CheckpointEngineManager(sender)
    manager.add_replica(server)
    try:
        await manager.sync(model.state_dict().items(), 0)
    finally:
        await sender.close()


@contextmanager
def servers(
    names: list[str], model: PreTrainedModel, arguments: argparse.Namespace, dtype: str, runner: asyncio.Runner
) -> Iterator[dict[str, ServerAdapter]]:
    """Started servers with the model's weights, by name; ended afterwards."""
    started: dict[str, ServerAdapter] = {}
    with tempfile.TemporaryDirectory(prefix="hone-benchmark-") as folder:
        if names:
            model.save_pretrained(Path(folder) / "model")
            build_tokenizer(BuildConfig()).save_pretrained(Path(folder) / "model")  # a server wants one
        try:
            for name in names:
                token, python = secrets.token_hex(16), getattr(arguments, f"python_{name}", "")
                server = adapter_of(name, Path(folder), dtype, python, token)
                started[name] = server
                runner.run(server.start())
                runner.run(push(server, model, token))
            yield started
        finally:
            for server in started.values():
                runner.run(server.close())


# ------------------------------------------------------------------------------------------------------------ all


def compare(arguments: argparse.Namespace, dtype: str, runner: asyncio.Runner) -> None:
    model = build(getattr(torch, dtype))
    inside = {
        name: BuiltinEngine(BuiltinSettings(execution=name), model)
        for name in arguments.engines
        if name in ("fused", "generic")
    }
    with servers([n for n in arguments.engines if n in ("separate", *OPTIONS)], model, arguments, dtype, runner) as far:
        engines: dict[str, Generating] = {**inside, **far}
        for number in arguments.concurrent:
            prompts = torch.randint(3, 2048, (-(-number // SAMPLES), PROMPT_TOKENS))
            prompts = prompts.repeat_interleave(SAMPLES, 0)[:number]
            for kind in arguments.lengths:
                lengths = lengths_of(kind, number)
                contestants = {
                    name: with_engine(engines[name], prompts, lengths, runner)
                    if name in engines
                    else with_generate(model, prompts, lengths)
                    for name in arguments.engines
                }
                report(race(contestants, arguments.rounds), f"{dtype:8} {number:4} {kind:7}", sum(lengths))


def report(timings: dict[str, Timing], what: str, tokens: int) -> None:
    first = next(iter(timings.values()))
    for name, timing in timings.items():
        print(
            f"{what} {name:9} {tokens / timing.wall_s:7.0f} tokens/s  wall {timing.wall_s:6.3f} s"
            f"  process {timing.process_s:6.3f} s"
            f"  ratio {first.wall_s / timing.wall_s:5.2f} (process {first.process_s / timing.process_s:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32,bfloat16", type=lambda t: t.split(","))
    parser.add_argument("--lengths", default="uniform,ragged", type=lambda t: t.split(","))
    parser.add_argument("--engines", default="generate,fused,generic", type=lambda t: t.split(","))
    parser.add_argument("--concurrent", default="128", type=lambda t: [int(n) for n in t.split(",")])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of this process")
    for name in OPTIONS:
        parser.add_argument(f"--python-{name}", default="", help=f"interpreter that has it; else .venv-{name}")
    arguments = parser.parse_args()
    known = ("generate", "fused", "generic", "separate", *OPTIONS)
    if unknown := [name for name in arguments.engines if name not in known]:
        parser.error(f"no engine {unknown[0]!r} (there is: {', '.join(known)})")
    torch.set_num_threads(arguments.threads)
    print(f"prompts of {PROMPT_TOKENS} tokens, {SAMPLES} samples each, {arguments.threads} threads")
    with asyncio.Runner() as runner:
        for dtype in arguments.dtype:
            compare(arguments, dtype, runner)


if __name__ == "__main__":
    main()
