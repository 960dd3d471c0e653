"""Overhead of ranks, the driver's share of a step and peak memory, by ranks, trajectories and model size.

    python benchmarks/scaling.py driver      # a Ray driver's seconds and bytes for steps of 64 to 16,384 trajectories
    python benchmarks/scaling.py ranks       # tokens/s of one SFT step at 1, 2 and 4 processes
    python benchmarks/scaling.py memory      # peak memory of a load and an export beside the model's size, per rank

`driver`: the policy trainer's own step over trajectories that are there already (nothing is generated), on the Ray
runtime with workers that answer at once, or with `--without-ray` with answers made on the spot. So what is measured is
what the driver does itself: filters, packing, advantages, cuts, calls, merging. Its processor time counts, with the
seconds in Ray's own threads; bytes are those of the arrays that it puts into the object store, and of those that it
takes out. Beside it stands a modelled step of the same tokens, see `modelled_s`.

`ranks`: the same batch on every number of processes, each on one thread. On a machine with fewer cores than processes
this shows what ranks cost, not what they gain.

`memory`: each rank's own memory (RssAnon, seen every 2 ms: mapped files are the page cache's) over what it was before,
in units of the whole model's bytes. The ranks' C library maps every larger block by itself: what is freed is gone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hone.algorithms.algorithm import Algorithm
from hone.composition import Layer
from hone.config import load_layers
from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.host_memory import keep_freed
from hone.runtime import ray as ray_runtime
from hone.runtime.batch_plan import plan, to_array
from hone.runtime.settings import RuntimeConfig
from hone.runtime.split import merge_tensors, split_batch
from hone.schedule.window import PromptLedger
from hone.tracking.metrics import Timer
from hone.trainers.policy.annotators import Annotator, OldLogprobs, ReferenceLogprobs, Values
from hone.trainers.policy.collection import RolloutLog
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.supply import PromptSupply
from hone.trainers.policy.trainer import PolicyParts, PolicyTrainer
from hone.trainers.run.context import RunContext
from hone.trainers.run.learners import Trained
from hone.trainers.run.profiler import Profiler
from hone.trainers.run.recorder import Recorder
from hone.types import Batch, Metric, ModelOutput, Prompt, StopReason, Trajectory, TrajectoryGroup
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker

TRAJECTORIES = (64, 256, 1024, 4096, 16384)
TOKENS = (10_000, 56_000, 316_000, 1_780_000, 10_000_000)
PER_PROMPT = 16
PROMPT_TOKENS = 32

RANK = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # the environment of a rank

# The modelled step: a dense policy on accelerators that train and generate in turn.
PARAMETERS = 7e9
DEVICES = 64
FLOPS = 4e14  # of one device, reached: 40 % of 1e15
DECODED = 2000.0  # tokens/s of one device in a full batch
LATENCY_S = 0.015  # one token of one sequence, however few there are

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"advantage": "grpo"}, "update": {"minibatches": 4}},
    "ppo": {
        "algorithm": {"advantage": "gae", "kl": {"where": "in_reward", "coef": 0.01}},
        "update": {"minibatches": 4, "epochs": 2},
        "critic": {},
    },
}


def modelled_s(tokens: int, longest: int) -> float:
    """Seconds of a step with as many tokens on `DEVICES`: each is generated, and forwarded once and trained once.

    2 N FLOPs for the forward, 6 N for the training; generation takes at least as long as its longest answer.
    """
    generated = max(tokens / (DEVICES * DECODED), longest * LATENCY_S)
    return generated + tokens * 8 * PARAMETERS / (DEVICES * FLOPS)


# ---------------------------------------------------------------------------------------------------------- driver


@dataclass
class Traffic:
    """Bytes of arrays between the driver and the object store."""

    put: int = 0
    taken: int = 0


class Instant:
    """A worker that computes nothing."""

    is_output_rank = True

    def __init__(self, spec: object) -> None:
        self.data_parallel_rank = int(os.environ["RANK"])
        self.data_parallel_size = int(os.environ["WORLD_SIZE"])

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset(), adapter: bool = True) -> ModelOutput:
        zeros = torch.zeros(batch.num_tokens)
        return ModelOutput(logprobs=zeros, values=zeros)

    def train_batch(self, batch: Batch, loss: object) -> dict[str, Metric]:
        return {"train/loss": Metric.mean(0.0)}


class Shelf:
    """Counts what would be put into the object store: each tensor once."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._placed: Any = WeakTensorKeyDictionary()

    def put(self, tensor: torch.Tensor) -> tuple[Any, str]:
        if tensor not in self._placed:
            self._placed[tensor] = to_array(tensor)
            self.traffic.put += tensor.nbytes
        return None, str(tensor.dtype)


class StubGroup:
    """A Ray group without Ray: it plans a call, and merges answers that are there at once."""

    def __init__(self, role: str, ranks: int, shelf: Shelf) -> None:
        self.role = role
        self._ranks = ranks
        self._shelf = shelf

    def call(self, method: str, *arguments: Any) -> Any:
        batch = next(one for one in arguments if isinstance(one, Batch))
        parts = split_batch(batch, self._ranks)
        plan(batch, parts, self._shelf.put)
        if method == "train_batch":
            return {"train/loss": Metric.mean(0.0)}
        lengths = batch.lengths
        answers = [torch.zeros(int(lengths[part].sum())) for part in parts]
        self._shelf.traffic.taken += sum(2 * one.nbytes for one in answers)
        return merge_tensors([{"logprobs": one, "values": one} for one in answers], parts, batch)

    def close(self) -> None:
        return None


def make_groups(trajectories: int, tokens: int, seed: int) -> list[TrajectoryGroup]:
    """As many trajectories, with lengths that are geometric above the prompt's and add up to about `tokens`."""
    rng = random.Random(seed)
    mean = max(tokens // trajectories - PROMPT_TOKENS, 2)
    groups = []
    for number in range(trajectories // PER_PROMPT):
        members = []
        for sample in range(PER_PROMPT):
            length = min(max(int(rng.expovariate(1 / mean)), 1), 8 * mean)
            total = PROMPT_TOKENS + length
            asked, said = (0,) * PROMPT_TOKENS, (1,) * length
            members.append(
                Trajectory(
                    prompt_id=f"p/{number}",
                    sample=sample,
                    token_ids=tuple(torch.randint(1000, 30_000, (total,)).tolist()),
                    prompt_length=PROMPT_TOKENS,
                    loss_mask=asked + said,
                    rollout_logprobs=(0.0,) * PROMPT_TOKENS + tuple((-torch.rand(length)).tolist()),
                    weight_versions=asked + said,
                    response="",
                    stop_reason=StopReason.STOP,
                    reward=rng.random(),
                    episode=sample,
                )
            )
        prompt = Prompt(f"p/{number}", members[0].token_ids[:PROMPT_TOKENS], (), None, "synthetic", draw=number)
        groups.append(TrajectoryGroup(prompt, tuple(members)))
    return groups


@contextmanager
def counted(traffic: Traffic) -> Iterator[None]:
    """Count what the runtime puts into and takes from the object store."""
    put, merge = ray_runtime.ray.put, ray_runtime._merge

    def count_put(value: Any) -> Any:
        traffic.put += value.nbytes
        return put(value)

    def count_merge(answers: Any, parts: Any, batch: Any) -> Any:
        traffic.taken += sum(array.nbytes for one in answers for array, _ in (one.tensors or {}).values())
        return merge(answers, parts, batch)

    ray_runtime.ray.put, ray_runtime._merge = count_put, count_merge
    try:
        yield
    finally:
        ray_runtime.ray.put, ray_runtime._merge = put, merge


def make_trainer(name: str, prompts: int, folder: Path, place: Callable[[str, Recorder], Any]) -> Any:
    """The policy trainer with everything around the driver's own work left out."""
    settings = {
        "run": {"dir": str(folder), "steps": 1000},
        "model": {"path": "none"},
        "data": {"train": {"path": "none"}},
        "reward": {"components": {"none": {"reward": "exact_match"}}},
        **ALGORITHMS[name],
    }
    update = {"prompts_per_step": prompts, "samples_per_prompt": PER_PROMPT, **settings.pop("update")}
    config = load_layers(PolicyRunConfig, [Layer("benchmark", {**settings, "update": update})]).config
    recorder = Recorder(Timer())
    tracking: Any = SimpleNamespace(rollouts=lambda *_: None, phase=lambda _: None, message=lambda _: None)

    def role(name: str) -> TrainHandle:
        return TrainHandle(place(name, recorder), recorder.record)

    algorithm = Algorithm(config.algorithm, config.update.minibatches * config.update.epochs)
    collector = SimpleNamespace(metrics=dict, groups=[])
    stream = SimpleNamespace(epoch=0, dropped={}, state_dict=dict)
    stream.take_unless = lambda skips, count: ([group.prompt for group in collector.groups], [])
    rollout = SimpleNamespace(make_room=lambda: None, sync_from=lambda actor, version: {})
    feed: Any = SimpleNamespace(
        room=lambda wanted, step: wanted,
        admit=lambda *_: None,
        take=lambda count, enough: collector.groups,
        commit=lambda *_: None,
        publish=rollout.sync_from,
        ahead=(),
    )
    actor, critic = role("actor"), role("critic") if algorithm.needs_values else None
    annotators: list[Annotator] = []
    if algorithm.needs_old_logprobs:
        annotators.append(OldLogprobs(actor, algorithm.infer_needs))
    if critic is not None:
        annotators.append(Values(critic))
    if algorithm.needs_reference:
        annotators.append(ReferenceLogprobs(role("reference"), algorithm.reference_needs))
    critics = [] if critic is None else [Trained(critic, algorithm.value_objective())]
    parts: Any = PolicyParts(
        supply=PromptSupply(stream, feed, algorithm.groups, dict, 0, []),  # type: ignore[arg-type]
        feed=feed,
        play=_Play(),  # type: ignore[arg-type]
        algorithm=algorithm,
        actor=actor,
        learners=[*critics, Trained(actor, algorithm.policy_objective())],
        annotators=annotators,
        adjust=[],
        teacher_choice=None,
        rollout_log=RolloutLog(tracking, 0),
        evaluator=None,  # type: ignore[arg-type]
        rollout=rollout,  # type: ignore[arg-type]
    )
    trainer = PolicyTrainer(
        config, parts, RunContext(folder, tracking, recorder, Profiler(None, None, config.runtime, folder, tracking))
    )
    return trainer, collector


@dataclass(frozen=True)
class _Play:
    """Parts of a play that the supply reads; nothing is played."""

    step: int = 0

    def at(self, step: int) -> _Play:
        return _Play(step)


def measure_driver(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    backend = {"name": "ray", "devices": arguments.ranks, "start_timeout_s": 300}
    runtime = load_layers(RuntimeConfig, [Layer("benchmark", {"backend": backend, "threads": 1})]).config
    shelf = Shelf(Traffic())
    keep_freed()  # as every run does

    def place(name: str, recorder: Recorder) -> Any:
        if arguments.without_ray:
            return StubGroup(name, arguments.ranks, shelf)
        return ray_runtime.RayWorkerGroup.place(name, Instant, None, runtime, recorder.phase)

    for name in arguments.algorithms:
        for trajectories, tokens in zip(arguments.trajectories, arguments.tokens, strict=True):
            rows.append(_measure_step(name, (trajectories, tokens), place, shelf, arguments.rounds))
            print(_driver_line(rows[-1]), flush=True)
    return rows


def _measure_step(
    name: str, size: tuple[int, int], place: Callable[[str, Recorder], Any], shelf: Shelf, rounds: int
) -> dict[str, Any]:
    trajectories, tokens = size
    groups = make_groups(trajectories, tokens, seed=0)
    longest = max(len(one.token_ids) for group in groups for one in group.trajectories)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trainer, collector = make_trainer(name, trajectories // PER_PROMPT, Path(folder), place)
        collector.groups = groups
        for number in range(rounds + 1):
            traffic = shelf.traffic = Traffic()
            trainer.supply.ledger = PromptLedger()
            gc.collect()
            wall, process = time.perf_counter(), time.process_time()
            with counted(traffic):
                trainer.step(number + 1)
            found.append((time.process_time() - process, time.perf_counter() - wall, traffic))
    process_s, wall_s, traffic = min(found[1:], key=lambda one: one[0])
    count = sum(len(one.token_ids) for group in groups for one in group.trajectories)
    step_s = modelled_s(count, longest)
    return {
        "algorithm": name,
        "trajectories": trajectories,
        "tokens": count,
        "driver_s": process_s,
        "wall_s": wall_s,
        "put_mib": traffic.put / 2**20,
        "taken_mib": traffic.taken / 2**20,
        "modelled_s": step_s,
        "share": process_s / step_s,
    }


def _driver_line(row: dict[str, Any]) -> str:
    return (
        f"{row['algorithm']:5} {row['trajectories']:6} trajectories {row['tokens']:9} tokens: driver "
        f"{row['driver_s']:7.3f} s (wall {row['wall_s']:7.3f}), put {row['put_mib']:8.1f} MiB, taken "
        f"{row['taken_mib']:7.1f} MiB, modelled step {row['modelled_s']:6.1f} s, share {row['share']:.2%}"
    )


# ----------------------------------------------------------------------------------------------------------- ranks


def measure_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for count in arguments.processes:
        found = _torchrun(count, "one-rank", "--rounds", str(arguments.rounds))
        rows.append(found[0])
        print(
            f"{count} processes: {rows[-1]['tokens_per_s']:8.0f} tokens/s, step {rows[-1]['step_s']:.2f} s", flush=True
        )
    return rows


def rank_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank's part: the best of some optimizer steps on one batch."""
    from hone.algorithms.aggregation import loss_weights
    from hone.algorithms.objective import SftObjective
    from hone.algorithms.settings import AggregationSettings
    from hone.runtime.local import LocalWorkerGroup

    rng = random.Random(0)
    samples = []
    for _ in range(64):
        length = rng.randint(16, 512)
        samples.append(Sample(tuple(rng.randint(2, 2000) for _ in range(length)), (0,) + (1,) * (length - 1)))
    batch = pack_samples(samples)
    batch = batch.with_(loss_weights=loss_weights(batch.loss_mask, batch.cu_seqlens, AggregationSettings()))
    build = BuildConfig(hidden_size=384, layers=6, heads=6, kv_heads=2, mlp_size=1024, max_positions=1024)
    engine = EngineConfig(compute_dtype="float32", max_tokens_per_microbatch=4096, optimizer=OptimizerConfig(lr=1e-4))
    spec = TrainSpec(ModelConfig(build=build), engine, total_steps=100)
    group = LocalWorkerGroup("actor", TrainWorker(spec), Recorder(Timer()).phase)
    group.call("initialize")
    vocabulary = 32
    batch = batch.with_(token_ids=batch.token_ids % vocabulary)
    best = float("inf")
    for _ in range(arguments.rounds + 1):
        began = time.perf_counter()
        group.call("train_batch", batch, SftObjective())
        best = min(best, time.perf_counter() - began)
    return {"processes": _world(), "tokens": batch.num_tokens, "step_s": best, "tokens_per_s": batch.num_tokens / best}


# ---------------------------------------------------------------------------------------------------------- memory


def measure_memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        size = _write_model(Path(folder))
        for count in arguments.processes:
            found = _torchrun(count, "one-memory", "--model", folder)
            worst = {key: max(one[key] for one in found) for key in ("load", "held", "export", "files")}
            rows.append({"processes": count, "model_mib": size / 2**20, **{k: v / size for k, v in worst.items()}})
            row = rows[-1]
            print(
                f"{count} processes, model {row['model_mib']:.0f} MiB; of it, worst rank: load {row['load']:.2f} (held "
                f"after it {row['held']:.2f}), export by tensors +{row['export']:.2f}, to files +{row['files']:.2f}",
                flush=True,
            )
    return rows


def _write_model(folder: Path) -> int:
    """A random Qwen3 of 150 M parameters in float32, in files of at most 100 MB; returns its bytes."""
    from material import build_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16_384,
        hidden_size=1024,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100MB")
    build_tokenizer().save_pretrained(folder)
    return sum(one.nbytes for one in model.state_dict().values()) - model.lm_head.weight.nbytes


def rank_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank's peaks over what it held before each phase, in bytes."""
    worker = TrainWorker(TrainSpec(ModelConfig(path=arguments.model), EngineConfig(compute_dtype="float32")))
    held: dict[str, Any] = {}
    before = _own_memory()
    with _peak(held, "load"):
        worker.initialize()
    gc.collect()
    held["held"] = _own_memory() - before
    with _peak(held, "export"):
        for _ in worker.weights(torch.float32):
            pass
    gc.collect()
    with _peak(held, "files"), tempfile.TemporaryDirectory() as folder:
        worker.engine.export_hf(Path(folder) if _world() == 1 else Path(arguments.model) / "export")
    return held


def _own_memory() -> int:
    """Bytes of this process that are of no file."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@contextmanager
def _peak(held: dict[str, Any], name: str) -> Iterator[None]:
    """The most that was held in the block beyond what was held at its start, as `held[name]`."""
    start, ended, seen = _own_memory(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.002):
            seen.append(_own_memory())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
        held[name] = max(*seen, _own_memory()) - start


# ------------------------------------------------------------------------------------------------------ processes


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _torchrun(count: int, *arguments: str) -> list[dict[str, Any]]:
    """Return the report of each of `count` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command = [*launch, __file__, *arguments, "--report", folder]
        subprocess.run(command, check=True, env={**os.environ, **RANK}, timeout=1200)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def _as_rank(work: Any, arguments: argparse.Namespace) -> None:
    from hone.runtime import ranks

    ranks.join(600)
    found = work(arguments)
    Path(arguments.report, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    ranks.meet()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=["driver", "ranks", "memory", "one-rank", "one-memory"])
    parser.add_argument("--rounds", type=int, default=3, help="measured steps, of which the best counts")
    parser.add_argument("--ranks", type=int, default=2, help="driver: Ray actors")
    parser.add_argument("--without-ray", action="store_true", help="driver: answers made on the spot, no Ray")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--trajectories", type=int, nargs="+", default=list(TRAJECTORIES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # as with `runtime.threads: 1`; threads that spin would count as work
    if arguments.what.startswith("one-"):
        _as_rank({"one-rank": rank_step, "one-memory": rank_memory}[arguments.what], arguments)
        return
    rows = {"driver": measure_driver, "ranks": measure_ranks, "memory": measure_memory}[arguments.what](arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
