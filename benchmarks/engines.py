"""Tokens per second and memory of the training engines side by side, on 1, 2 and 4 processes.

    python benchmarks/engines.py [--ranks 1,2,4] [--rounds 5] [--hidden 256] [--layers 8] [--tokens 4096]
    python benchmarks/engines.py --meshes "fsdp2 4 shard=2 tensor=2;megatron 4 tensor=2 pipeline=2"

A row is an engine on a mesh: every rank is a process with one thread. All rows of a number of ranks are started once,
then each round takes one optimizer step of every row in turn, so that a slow minute of the machine slows them alike.
All rows train the same model on the same ragged sequences. "of fsdp2" is the median over the rounds of a row's speed
divided by that of plain `fsdp2` on as many ranks in the same round. Memory is the largest resident size of a rank (on a
GPU: allocated by torch) less that before its engine was made.

With more processes than cores the rows share cores: compare them, and do not read the figures as scaling.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hone.data.packing import Sample, balanced, pack_samples, select, sequence_costs
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.base import current_platform
from hone.runtime.ranks import join
from hone.trainers.run.run_model import local_model
from hone.types import Batch, LossOutput, ModelOutput
from hone.workers.train import TrainSpec, TrainWorker

DEADLINE_S = 600.0
WARM_UP = 2
LONGEST = 512
MIB = 2**20
MESHES = """
fsdp2 1; megatron 1
fsdp2 2; fsdp2 2 tensor=2; fsdp2 2 sequence=2; megatron 2; megatron 2 tensor=2 sequence=true; megatron 2 context=2;
megatron 2 pipeline=2
fsdp2 4; fsdp2 4 shard=2 tensor=2; megatron 4; megatron 4 tensor=2 sequence=true; megatron 4 pipeline=2;
megatron 4 tensor=2 pipeline=2
"""


@dataclass(frozen=True)
class Mesh:
    """An engine, and how it lies over its ranks."""

    backend: str
    ranks: int
    parallel: dict[str, int | bool] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Mesh:
        """From `megatron 4 tensor=2 sequence=true`. Raises SystemExit with what is wrong."""
        found = re.fullmatch(r"(\w+) (\d+)((?: \w+=(?:\d+|true))*)", " ".join(text.split()))
        if found is None:
            raise SystemExit(
                f"{text.strip()!r} is no mesh: expected something like 'megatron 4 tensor=2 sequence=true'"
            )
        settings = dict(one.split("=") for one in found[3].split())
        return cls(found[1], int(found[2]), {key: value == "true" or int(value) for key, value in settings.items()})

    def __str__(self) -> str:
        settings = [f"{key} {value}" if value is not True else key for key, value in self.parallel.items()]
        return f"{self.backend}, {', '.join(settings) or 'data parallel' if self.ranks > 1 else 'one process'}"


@dataclass(frozen=True)
class Work:
    """The model and the batch that every row trains."""

    model: ModelConfig
    tokens: int

    def batch(self) -> Batch:
        """Ragged sequences of at most 512 tokens, `tokens` in all."""
        rng = random.Random(0)
        lengths: list[int] = []
        while (left := self.tokens - sum(lengths)) > 0:
            lengths.append(min(left, rng.randint(32, LONGEST)))
        lengths = [*lengths[:-2], sum(lengths[-2:]) // 2, sum(lengths[-2:]) - sum(lengths[-2:]) // 2]
        samples = [Sample(tuple(rng.choices(range(3, 60), k=length)), (0,) + (1,) * (length - 1)) for length in lengths]
        batch = pack_samples(samples)
        return batch.with_(loss_weights=torch.full((batch.num_tokens,), 1 / batch.num_tokens))


def likelihood(output: ModelOutput, _: Batch) -> LossOutput:
    """The negative log-likelihood of each token."""
    assert output.logprobs is not None
    return LossOutput(-output.logprobs)


def used_bytes() -> int:
    """The largest memory that this process has had: allocated on a GPU, resident on a CPU."""
    if current_platform().device != "cpu":
        return int(current_platform().memory().peak)
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def be_a_rank(pipe: Connection, mesh: Mesh, rank: int, port: int, work: Work) -> None:
    """Make the engine, then take a step and tell (seconds, bytes of memory) each time that the pipe asks for it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # megatron-core's, of functions that torch renamed
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": mesh.ranks, "LOCAL_WORLD_SIZE": mesh.ranks}
    os.environ |= {**{key: str(value) for key, value in where.items()}, "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    join(DEADLINE_S)
    torch.manual_seed(0)
    before = used_bytes()
    backend = EngineRegistry.backends.settings(mesh.backend)(parallel=mesh.parallel or None)
    config = EngineConfig(
        compute_dtype="float32", max_tokens_per_microbatch=2048, backend=backend, optimizer=OptimizerConfig(lr=1e-4)
    )
    worker = TrainWorker(TrainSpec(work.model, config, total_steps=1000))
    worker.initialize()
    engine, batch = worker.engine, work.batch()
    parts = balanced(sequence_costs(batch), engine.ranks.data_parallel_size)
    own = select(batch, parts[engine.ranks.data_parallel_rank])
    while pipe.recv() == "step":
        begin = time.perf_counter()
        with engine.train_mode():
            engine.train_batch(own, likelihood)
        current_platform().synchronize()
        pipe.send((time.perf_counter() - begin, used_bytes() - before))


class Row:
    """The processes of one mesh."""

    def __init__(self, mesh: Mesh, work: Work) -> None:
        self.mesh = mesh
        self.seconds: list[float] = []
        self.memory = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(mesh.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=be_a_rank, args=(theirs, mesh, rank, port, work), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of its pipe
            self._pipes.append(mine)
            self._processes.append(process)

    def step(self) -> float:
        """One optimizer step of all ranks; the seconds of the slowest."""
        for pipe in self._pipes:
            pipe.send("step")
        found = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                raise SystemExit(f"{self.mesh}: rank {rank} did not end its step within {DEADLINE_S:g} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"{self.mesh}: rank {rank} ended; its error is above") from None
        self.memory = max(memory for _, memory in found)
        return max(seconds for seconds, _ in found)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(DEADLINE_S)


def measure(meshes: Sequence[Mesh], work: Work, rounds: int) -> list[Row]:
    """Steps of all rows in turn; the first ones are not counted."""
    rows = [Row(mesh, work) for mesh in meshes]
    try:
        for number in range(-WARM_UP, rounds):
            for row in rows:
                seconds = row.step()
                if number >= 0:
                    row.seconds.append(seconds)
    finally:
        for row in rows:
            row.close()
    return rows


def table(rows: Sequence[Row], tokens: int) -> list[str]:
    """Markdown lines, one for each row."""
    plain = next((row for row in rows if row.mesh.backend == "fsdp2" and not row.mesh.parallel), rows[0])
    lines = []
    for row in rows:
        ratio = median(theirs / mine for mine, theirs in zip(row.seconds, plain.seconds, strict=True))
        speed = tokens / median(row.seconds)
        lines.append(f"| {row.mesh.ranks} | {row.mesh} | {speed:,.0f} | {ratio:.2f} | {row.memory / MIB:,.0f} MiB |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--meshes", default=MESHES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    given = parser.parse_args()
    sizes = {
        "hidden_size": given.hidden,
        "layers": given.layers,
        "mlp_size": 3 * given.hidden,
        "max_positions": LONGEST,
    }
    build = BuildConfig(**sizes, heads=max(2, given.hidden // 64), kv_heads=2)
    meshes = [Mesh.read(text) for text in re.split(r"[;\n]", given.meshes) if text.strip()]
    print("| ranks | engine | tokens/s | of fsdp2 | memory per rank |\n|---|---|---|---|---|", flush=True)
    with TemporaryDirectory(prefix="engines-") as folder:
        work = Work(local_model(ModelConfig(build=build), Path(folder) / "model"), given.tokens)
        for ranks in map(int, given.ranks.split(",")):
            chosen = [mesh for mesh in meshes if mesh.ranks == ranks]
            if chosen:
                print("\n".join(table(measure(chosen, work, given.rounds), given.tokens)), flush=True)


if __name__ == "__main__":
    main()
