"""Cost of layers that carry a state: training steps of hybrid models beside one of attention alone.

    python -m benchmarks.hybrids [--rounds 3] [--hidden 256] [--layers 8] [--tokens 4096] [--answers 1 --prompt 256]

All rows train on the same ragged sequences of at most 512 tokens, in one micro-batch and one thread, each in a process
of its own; the processes take one optimizer step each in turn. "in batches" is how hone computes a layer with a state:
sequences of like length side by side, with little padding (`hone.models.attention.stateful`). "one by one" gives it a
sequence at a time. With `--answers` above 1, so many answers have a prompt of `--prompt` tokens in common, which hone
computes once; "prompts by each" lets each answer compute it. Speed is by processor time, the fastest step; memory is
the largest resident size less that before the engine was made.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.engines import DEADLINE_S, LONGEST, MIB, WARM_UP, Work, likelihood, used_bytes
from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.attention import stateful
from hone.models.settings import BuildConfig, ModelConfig
from hone.trainers.run.run_model import local_model
from hone.types import Batch
from hone.workers.train import TrainSpec, TrainWorker


@dataclass(frozen=True)
class Case:
    """One row: an architecture, and how its layers with a state get their sequences."""

    title: str
    architecture: str
    options: dict[str, Any]
    way: str = ""  # "one by one", "prompts by each"; else as hone computes


@dataclass(frozen=True)
class Answers(Work):
    """Answers in groups that have a prompt in common."""

    answers: int
    prompt: int

    def batch(self) -> Batch:
        """Ragged answers; prompts and answers together are `tokens` or a little more, a prompt counted once."""
        rng = random.Random(0)
        samples: list[Sample] = []
        groups: list[int] = []
        total = 0
        while total < self.tokens:
            prompt = tuple(rng.choices(range(3, 60), k=self.prompt))
            lengths = [rng.randint(32, LONGEST - self.prompt) for _ in range(self.answers)]
            total += self.prompt + sum(lengths)
            groups += [len(groups) // self.answers] * self.answers
            for length in lengths:
                answer = tuple(rng.choices(range(3, 60), k=length))
                samples.append(Sample(prompt + answer, (0,) * self.prompt + (1,) * length))
        batch = pack_samples(samples).with_(group_index=torch.tensor(groups))
        return batch.with_(loss_weights=torch.full((batch.num_tokens,), 1 / batch.num_tokens))


def cases(hidden: int, layers: int, shared: bool) -> list[Case]:
    heads, quarter = max(2, hidden // 64), max(1, layers // 4)
    delta = {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * quarter,
        "linear_num_value_heads": heads,
        "linear_num_key_heads": heads,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    mamba = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * quarter,
        "mamba_num_heads": heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
        "chunk_size": 64,
    }
    found = [Case("attention alone (Qwen3)", "qwen3", {})]
    for title, architecture, options in (
        ("3 gated DeltaNet to 1 attention (Qwen3.5), in batches", "qwen3_5_text", delta),
        ("Mamba 2, MLP, attention, MLP (Nemotron-H), in batches", "nemotron_h", mamba),
    ):
        ways = ("one by one", *(("prompts by each",) if shared else ()))
        found.append(Case(title, architecture, options))
        found += [Case(f"the same, {way}", architecture, options, way) for way in ways]
    return found


def train(pipe: Connection, work: Work, way: str) -> None:
    """Tell the number of weights, then take a step and tell (seconds, bytes) each time that the pipe asks for it."""
    torch.set_num_threads(1)
    if way == "one by one":
        stateful._PADDED = 0.0  # a second sequence is always more than this allows
    if way == "prompts by each":
        stateful.goes_on = lambda cls, token_by_token=True: False
    before = used_bytes()
    config = EngineConfig(
        compute_dtype="float32", max_tokens_per_microbatch=8 * work.tokens, optimizer=OptimizerConfig(lr=1e-4)
    )
    worker = TrainWorker(TrainSpec(work.model, config, total_steps=1000))
    worker.initialize()
    batch = work.batch()
    pipe.send(sum(weight.numel() for weight in worker.engine.model.parameters()))
    while pipe.recv():
        begin = time.process_time()
        with worker.engine.train_mode():
            worker.engine.train_batch(batch, likelihood)
        pipe.send((time.process_time() - begin, used_bytes() - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"rounds": 3, "hidden": 256, "layers": 8, "tokens": 4096, "answers": 1, "prompt": 256}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    sizes = {"hidden_size": given.hidden, "layers": given.layers, "mlp_size": 3 * given.hidden, "kv_heads": 2}
    sizes |= {"heads": max(2, given.hidden // 64), "max_positions": LONGEST}
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="hybrids-") as folder:
        pipes, chosen, counts = [], cases(given.hidden, given.layers, given.answers > 1), []
        for number, case in enumerate(chosen):
            build = BuildConfig(**sizes, architecture=case.architecture, options=case.options)
            model = local_model(ModelConfig(build=build), Path(folder) / str(number))
            pipe, theirs = context.Pipe()
            work = Work(model, given.tokens)
            if given.answers > 1:
                work = Answers(model, given.tokens, given.answers, given.prompt)
            tokens = work.batch().num_tokens
            context.Process(target=train, args=(theirs, work, case.way), daemon=True).start()
            theirs.close()  # so that the end of the process is the end of its pipe
            pipes.append(pipe)
            counts.append(answer(pipe, case))
        found: list[list[tuple[float, int]]] = [[] for _ in chosen]
        for number in range(-WARM_UP, given.rounds):
            for case, pipe, steps in zip(chosen, pipes, found, strict=True):
                pipe.send(True)
                taken = answer(pipe, case)
                steps.extend([taken] if number >= 0 else [])
        for pipe in pipes:
            pipe.send(False)
        print("| model | weights | tokens/s | of attention | memory |\n|---|---|---|---|---|")
        fastest = [min(seconds for seconds, _ in steps) for steps in found]
        for case, count, seconds, steps in zip(chosen, counts, fastest, found, strict=True):
            memory = max(held for _, held in steps) / MIB
            speed, ratio = tokens / seconds, fastest[0] / seconds
            print(f"| {case.title} | {count / 1e6:.1f} M | {speed:,.0f} | {ratio:.2f} | {memory:,.0f} MiB |")


def answer(pipe: Connection, case: Case) -> Any:
    """Wait for what the process of a row sends. Raises SystemExit if it sends nothing or has ended."""
    if not pipe.poll(DEADLINE_S):
        raise SystemExit(f"{case.title}: no answer within {DEADLINE_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"{case.title}: its process ended; its error is above") from None


if __name__ == "__main__":
    main()
