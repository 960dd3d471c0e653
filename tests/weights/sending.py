"""Training ranks for the tests: real processes that gather their shards by gloo, and send what they gathered."""

import os
import signal

import torch
import torch.distributed as dist

from hone.runtime import ranks
from hone.weights.base import RankWeights
from hone.weights.transports.rank_sender import RankSender
from tests.weights.devices import have_devices
from tests.weights.receiving import CONTEXT

ROWS = 48  # divided by 2 and by 4 ranks
LAYERS = 8


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
        yield name, (whole + 1 if fault == f"differs:{rank}" and number == 3 else whole)


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
            answer = sender.follow(order, ranks.rank(), lambda given=given: gathered(*given))
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
