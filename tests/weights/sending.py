"""Training ranks for the tests: real processes that gather their shards by gloo, and send what they gathered."""

import asyncio
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from hone.models.parts.boxes import Boxed
from hone.runtime import ranks
from hone.weights import TRANSPORTS
from hone.weights.base import RankWeights
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports.bucketed.folders import PREFIX
from hone.weights.transports.ipc import rank_sender
from hone.weights.transports.ipc.engine import IpcEngine
from hone.weights.transports.ipc.rank_sender import RankSender
from tests.weights.devices import have_devices
from tests.weights.receiving import CONTEXT, TOKEN

ROWS = 48  # divided by 2 and by 4 ranks
LAYERS = 8
BUCKET = 1 << 14


def weights_of(version, dtype=torch.float32):
    """The weights of a version, as every process can compute them."""
    generator = torch.Generator().manual_seed(version)
    return {f"layer.{i}": torch.randn(ROWS, 64, generator=generator).to(dtype) for i in range(LAYERS)}


def gathered(version, dtype, fault):
    """Gather each tensor from the rows that the ranks hold."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, (name, tensor) in enumerate(weights_of(version, dtype).items()):
        if fault == f"dies:{rank}" and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        whole = torch.empty_like(tensor)
        dist.all_gather(list(whole.chunk(world)), tensor.chunk(world)[rank].clone())
        if fault == f"leaves out:{rank}" and number == 3:
            continue
        yield name, (whole + 1 if fault == f"differs:{rank}" and number == 3 else whole)


@contextmanager
def broken(fault, rank):
    """Break this process's sender: it cuts other boxes than it says, or a bit of a bucket changes after the digest."""
    cut, ship = rank_sender.cut, IpcEngine._ship

    def other(weights, boxes, made):
        shifted = {name: Boxed(shape, mirrored(shape, box)) for name, (shape, box) in boxes.items()}
        return cut(weights, shifted, made)

    async def torn(self, number, filled, last):
        if number == 1 and filled.groups:
            self._bucket(number)[filled.used - 1] ^= 1
        await ship(self, number, filled, last)

    try:
        if fault == f"other boxes:{rank}":
            rank_sender.cut = other
        if fault == f"tears:{rank}":
            IpcEngine._ship = torn
        yield
    finally:
        rank_sender.cut, IpcEngine._ship = cut, ship


def mirrored(shape, box):
    """The box at the other end."""
    return tuple((length - stop, length - start) for length, (start, stop) in zip(shape, box, strict=True))


def serve(pipe, rank, world, store, device):
    """One rank: carries out orders until its pipe ends."""
    have_devices(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    sender = RankSender()
    while True:
        try:
            order, given = pipe.recv()
        except EOFError:
            return
        try:
            with broken(given[2], rank):
                answer = sender.follow(order, ranks.rank(), lambda needs, given=given: gathered(*given))
            pipe.send((answer, type(order).__name__))
        except Exception as error:  # noqa: BLE001  told to the test
            pipe.send((f"{type(error).__name__}: {error}", "failed"))


class Ranks:
    """The processes of all ranks."""

    def __init__(self, devices, store):
        self.orders = []  # what was ordered, by name
        self._pipes, self.processes = [], []
        for rank, device in enumerate(devices):
            ours, theirs = CONTEXT.Pipe()
            given = theirs, rank, len(devices), store, device
            self.processes.append(CONTEXT.Process(target=serve, args=given, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def ask(self, order, given):
        """As a worker group: every rank gets the order, and one that fails or ends is an error."""
        self.orders.append(type(order).__name__)
        for pipe in self._pipes:
            pipe.send((order, given))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answer, kind = pipe.recv() if pipe.poll(60) else ("no answer", "failed")
            except EOFError:
                answer, kind = "it ended", "failed"
            if kind == "failed":
                raise RuntimeError(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)


class Gathered(RankWeights):
    """The weights of a version on the ranks; the driver never gathers them itself."""

    def __init__(self, ranks, version, dtype=torch.float32, fault=""):
        self._ranks = ranks
        self._given = version, dtype, fault

    def __iter__(self):
        raise AssertionError("the driver opened the stream of the ranks")

    def order(self, order):
        return self._ranks.ask(order, self._given)


def run(body, timeout_s=30):
    """Run `await body(manager, engine)` on a new driver; afterwards no folder of it is left."""

    async def whole():
        threads = ThreadPoolExecutor(32)  # each receiver waits in one
        asyncio.get_running_loop().set_default_executor(threads)
        engine = TRANSPORTS.get("ipc")(BUCKET, timeout_s, TOKEN)
        try:
            async with asyncio.timeout(60):
                return await body(CheckpointEngineManager(engine), engine)
        finally:
            await engine.close()

    usual = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="hone-") as own:  # other tests have such folders at the same time
        tempfile.tempdir = own
        try:
            return asyncio.run(whole())
        finally:
            tempfile.tempdir = usual
            assert list(Path(own).glob(f"{PREFIX}*")) == []
