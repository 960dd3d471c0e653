"""Workers that the tests of the Ray runtime place: in a file that an actor imports quickly."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hone.types import Metric, ModelOutput


@dataclass(frozen=True)
class Spec:
    """What a worker of these is made from."""

    offset: int = 1


class Worker:
    """One of the data-parallel ranks of its pool; each gives results."""

    is_output_rank = True

    def __init__(self, spec):
        self.offset = spec.offset
        alone = not dist.is_initialized()  # a pool of one rank has nobody to meet
        self.data_parallel_rank, self.data_parallel_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())


class Echo(Worker):
    """Gives back what it was given, and says who had it."""

    def infer_batch(self, batch, needs=frozenset()):
        rank = torch.full((batch.num_tokens,), float(self.data_parallel_rank))
        exact = batch.token_ids.to(torch.bfloat16)
        return ModelOutput(logprobs=batch.token_ids.float() + self.offset, extras={"rank": rank, "exact": exact})

    def train_batch(self, batch, loss):
        batch.token_ids.zero_()  # a rank's part is its own: the driver's batch stays
        return {"a": Metric.mean(float(self.data_parallel_rank), batch.num_tokens), "b": Metric.sum(loss(1.0))}

    def sums(self, tensors, factor):
        return {name: float(tensor.float().sum() * factor) for name, tensor in tensors.items()}

    def where(self, path):
        return str(path), self.data_parallel_rank

    def weights(self, count):
        for number in range(count):
            yield f"w{number}", torch.full((2**18,), number, dtype=torch.bfloat16)  # half a MiB


SQUARE = [9, 3, 8, 11, 6]
"""Lengths of sequences that are dealt out otherwise where attention's square counts (`LongRows`)."""


class LongRows(Echo):
    """A model whose attention costs as much as everything else at 4 tokens."""

    equal_cost_length = 4.0


class Second(Echo):
    """Only the second rank gives results, as if the first computed the same."""

    def __init__(self, spec):
        super().__init__(spec)
        self.is_output_rank = self.data_parallel_rank == 1
        self.data_parallel_rank, self.data_parallel_size = 0, 1


class Broken(Worker):
    """Its second rank raises while the first waits for it."""

    def train_batch(self, batch, loss):
        if self.data_parallel_rank == 0:
            dist.barrier()
        print("about to divide")
        return 1 / 0


class Killed(Worker):
    """Its second rank ends as by `kill -9`."""

    def train_batch(self, batch, loss):
        if self.data_parallel_rank == 0:
            dist.barrier()
        print("still here", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Hanging(Worker):
    """Its second rank does not come back."""

    def train_batch(self, batch, loss):
        if self.data_parallel_rank == 0:
            dist.barrier()
        time.sleep(1000)


class Waiting:
    """An object of an actor, one of whose coroutines lasts as long as a server."""

    def __init__(self, devices):
        pass

    async def process(self):
        return os.getpid()

    async def ended(self):
        await asyncio.sleep(1000)
