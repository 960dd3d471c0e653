"""The weight sync's transports beside a plain copy of the same bytes in memory, in GB/s.

    python benchmarks/weight_sync.py                                  # 0.5 GB, every transport, both layouts
    python benchmarks/weight_sync.py --transports ipc --rounds 9 --json out.json
    python benchmarks/weight_sync.py --device cuda --transports ipc   # beside a copy within the GPU

A sender (this process) and a receiver (another) share the machine. Every tensor ends in storage of the receiver's own,
so that afterwards both hold the weights, as after a plain copy; both take the digest of every byte, and the round ends
when they are known to be equal. `ipc` writes them right into that storage, as the built-in engine has it; `ipc by hand`
hands over each where it lies in the bucket, to be copied from there, as a loader does. `tensor by tensor` is what
buckets replace: for each tensor a new shared memory, a message, and an answer, without any digest.

All take turns. Each is compared with the copy of its own round, because the speed of a shared machine drifts by more
than what is compared; the median of these shares counts, and the share of the fastest round by the copy's fastest is
printed too. Beside them stand the median wall time and process times of both sides: they work at the same time, so on
two free cores the greater of the two is about the wall time, and a wall time far above it means that something else
used the machine. `digest` is one pass of the digest over the bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hone.weights import TRANSPORTS
from hone.weights.base import CheckpointEngine, Full
from hone.weights.delivery import receive
from hone.weights.digests.digest import digest_tensors, method_for

LAYOUTS = {"many small": 64 << 10, "few large": 64 << 20}  # bytes of one tensor
TOKEN = secrets.token_hex(16)
TIMEOUT_S = 300.0
HANDED_OVER = " by hand"


@dataclass(frozen=True)
class Timing:
    """Medians over the rounds."""

    layout: str
    way: str
    gb_per_s: float
    of_copy: float  # its speed as a share of the plain copy's in the same round
    fastest_of_copy: float  # the same of its fastest round and the copy's fastest
    wall_s: float
    process_s: float  # of the sender, or of the one process there is
    receiver_s: float


def make(total: int, each: int, device: str) -> dict[str, torch.Tensor]:
    if total < each:
        raise SystemExit(f"--gb is too small for one tensor of {each} bytes: choose at least {each / 1e9:.3f}")
    return {f"layer.{i}.weight": torch.randn(each // 4, device=device) for i in range(total // each)}


def receiving(pipe: Connection, threads: int) -> None:
    """The other process: does what it is told, until told `stop`."""
    torch.set_num_threads(threads)
    storage: dict[str, torch.Tensor] = {}
    while (request := pipe.recv()) != "stop":
        started = time.process_time()
        if request == "tensor by tensor":
            take_one_by_one(pipe, storage)
            answer = "done"
        else:
            offer, token, in_place = request
            with receive(offer, 0, token, copy=False, targets=storage if in_place else None) as delivery:
                for name, tensor in delivery:
                    keep(storage, name, tensor)
            answer = delivery.digest
        pipe.send((answer, time.process_time() - started))


def keep(storage: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    mine = storage.get(name)
    if mine is None:
        storage[name] = tensor.clone()
    elif mine is not tensor:
        mine.copy_(tensor)


def take_one_by_one(pipe: Connection, storage: dict[str, torch.Tensor]) -> None:
    while (told := pipe.recv()) is not None:
        name, where, count = told
        memory = SharedMemory(where)
        keep(storage, name, torch.frombuffer(memory.buf, dtype=torch.float32, count=count))
        pipe.send("taken")
        try:
            memory.close()
        except BufferError:  # the view above is freed a moment later
            memory._buf = None


def send_one_by_one(pipe: Connection, weights: dict[str, torch.Tensor]) -> float:
    pipe.send("tensor by tensor")
    for name, tensor in weights.items():
        memory = SharedMemory(create=True, size=tensor.numel() * 4)
        room = torch.frombuffer(memory.buf, dtype=torch.float32, count=tensor.numel())
        room.copy_(tensor)
        pipe.send((name, memory.name, tensor.numel()))
        pipe.recv()
        del room
        memory.close()
        memory.unlink()
    pipe.send(None)
    return float(pipe.recv()[1])


async def send(
    engine: CheckpointEngine, pipe: Connection, weights: dict[str, torch.Tensor], version: int, in_place: bool
) -> float:
    """One whole sync, proven; the receiver's process time."""
    engine.build_topology({"receiver": 1})
    pipe.send((engine.prepare(version, Full()).for_replica("receiver").to_json(), TOKEN, in_place))
    await engine.init_process_group()
    sent = await engine.send_weights(weights.items(), version)
    digest, seconds = await asyncio.to_thread(pipe.recv)
    await engine.finalize()
    if digest != sent.digest or sent.lost:
        raise SystemExit(f"{engine.transport}: the receiver has {digest}, sent was {sent}")
    return float(seconds)


def ways(
    names: list[str], pipe: Connection, weights: dict[str, torch.Tensor], bucket: int, run: Callable[..., Any]
) -> tuple[dict[str, Callable[[int], float]], list[CheckpointEngine]]:
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    for tensor in target.values():
        tensor.zero_()  # the memory is there before the first round

    def digest(_: int) -> float:
        digest_tensors(weights.items(), method_for(next(iter(weights.values())).device))
        return 0.0

    def copy(_: int) -> float:
        for name, tensor in weights.items():
            target[name].copy_(tensor)
        if next(iter(target.values())).is_cuda:
            torch.cuda.synchronize()
        return 0.0

    def whole(engine: CheckpointEngine, in_place: bool, version: int) -> float:
        return float(run(send(engine, pipe, weights, version, in_place)))

    chosen: dict[str, Callable[[int], float]] = {"copy": copy, "digest": digest}
    engines = []
    for name in names:
        if name == "tensor by tensor":
            chosen[name] = lambda _: send_one_by_one(pipe, weights)
            continue
        engine = TRANSPORTS.get(name.removesuffix(HANDED_OVER))(bucket, TIMEOUT_S, TOKEN)
        engines.append(engine)
        in_place = not name.endswith(HANDED_OVER)
        chosen[name] = partial(whole, engine, in_place)
    return chosen, engines


def measure(layout: str, arguments: argparse.Namespace, run: Callable[..., Any]) -> list[Timing]:
    total = int(arguments.gb * 1e9) // LAYOUTS[layout] * LAYOUTS[layout]
    weights = make(total, LAYOUTS[layout], arguments.device)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receiving, args=(theirs, arguments.threads), daemon=True)
    process.start()
    chosen, engines = ways(arguments.transports, pipe, weights, arguments.bucket_mib << 20, run)
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in chosen}
    for version in range(arguments.rounds + 1):
        for name, way in chosen.items():
            wall, cpu = time.perf_counter(), time.process_time()
            there = way(version)
            taken = (time.perf_counter() - wall, time.process_time() - cpu, there)
            if version > 0:  # the first maps memory and forms groups
                rounds[name].append(taken)
    for engine in engines:
        run(engine.close())
    pipe.send("stop")
    process.join(10)
    copies = [taken[0] for taken in rounds["copy"]]
    found = []
    for name, all_taken in rounds.items():
        share = median(copy / taken[0] for copy, taken in zip(copies, all_taken, strict=True))
        fastest = min(copies) / min(taken[0] for taken in all_taken)
        wall, cpu, there = map(median, zip(*all_taken, strict=True))
        found.append(Timing(layout, name, total / wall / 1e9, share, fastest, wall, cpu, there))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transports", default="ipc,ipc by hand,collective,nixl,disk,tensor by tensor", type=lambda t: t.split(",")
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS), type=lambda t: t.split(","))
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model, 1e9 bytes")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = []
    with asyncio.Runner() as runner:
        for layout in arguments.layouts:
            found += (timings := measure(layout, arguments, runner.run))
            print(f"{layout}: tensors of {LAYOUTS[layout] >> 10} KiB")
            for timing in timings:
                share = f"{timing.of_copy:5.2f} of copy (fastest {timing.fastest_of_copy:.2f})"
                figures = f"{timing.gb_per_s:6.2f} GB/s {share}"
                process = f"process {timing.process_s:.3f} s, receiver's {timing.receiver_s:.3f} s"
                print(f"  {timing.way:<17}{figures}  wall {timing.wall_s:.3f} s  {process}")
    if arguments.json:
        facts = {name: value for name, value in vars(arguments).items() if name != "json"}
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
        text = json.dumps({"settings": facts, "machine": machine, "timings": [asdict(t) for t in found]}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
