"""Receivers that keep what their rank of an engine needs: they load each tensor as a rank of some layout does.

rows      tensor parallel: half of the rows of even layers, half of the columns of odd ones, all of the last
experts   expert parallel: every rank has its own layers, and all have the first
stages    pipeline parallel: the first ranks have the first layers
fused     a row of a layer is an expert with a gate and an up matrix, of which a rank has halves for half of the experts
leaky     as rows, but nobody has the last rows of layer.2, and nobody layer.6
"""

import asyncio

import torch

from hone.rollout.base import WeightReceipt
from hone.weights.digests.digest import digest_tensors
from hone.weights.wants import Wants, watched
from tests.weights.devices import have_devices
from tests.weights.receiving import CONTEXT, TOKEN, ProcessReplica, Rank
from tests.weights.sending import LAYERS

OUTSIDE = "reads outside"  # of the box that it read before


def part(layout, name, tensor, rank, ranks):
    """What a rank keeps of a tensor; None: nothing."""
    number = int(name.rpartition(".")[2])
    if layout == "experts":
        return tensor if number == 0 or number % ranks == rank else None
    if layout == "stages":
        return tensor if number * ranks // LAYERS == rank else None
    if layout == "fused":
        experts, half = len(tensor) // 2, slice(rank % 2 * 16, rank % 2 * 16 + 16)
        mine = tensor.narrow(0, rank // 2 * experts, experts)
        return torch.cat([torch.cat([one[:32][half], one[32:][half]]) for one in mine])
    if layout == "leaky" and number in (2, 6):
        return tensor.narrow(0, rank * 8, 8) if number == 2 else None
    if number == LAYERS - 1:
        return tensor.clone()
    if number % 2:
        return tensor.chunk(ranks, 1)[rank].contiguous()
    rows = tensor.shape[0] // ranks
    return tensor.narrow(0, rank * rows, rows)


def serve(pipe, *devices):
    """One rank: loads what its layout keeps, and answers with what it holds."""
    have_devices(*devices)
    torch.set_num_threads(1)
    wants, held = Wants(), {}
    while True:
        try:
            offer, rank, ranks, layout, fault = pipe.recv()
        except EOFError:
            return
        try:
            with wants.learning(offer, rank, TOKEN) as (delivery, reads):
                came = {}
                for name, tensor in watched(delivery, reads):
                    came[name] = tuple(tensor.part.shape)
                    other = (rank + 1) % ranks if fault == OUTSIDE and name == "layer.4" else rank
                    kept = part(layout, name, tensor, other, ranks)
                    if kept is not None:
                        held[name] = torch.empty(kept.shape, dtype=kept.dtype).copy_(kept)
            pipe.send((delivery.version, delivery.digest, digest_tensors(held.items()), delivery.bytes, came))
        except Exception as error:  # noqa: BLE001  told to the test
            pipe.send(f"{type(error).__name__}: {error}")


class LayoutRank(Rank):
    """One receiving process of a layout."""

    target = staticmethod(serve)


class LayoutReplica(ProcessReplica):
    """A replica whose ranks keep parts."""

    def __init__(self, name, layout, devices):
        super().__init__(name, len(devices), devices=devices, kind=LayoutRank)
        self.layout = layout
        self.bytes, self.held, self.came = [], [], []  # of each rank in the last sync

    async def receive_weights(self, offer):
        faults = [""] * (self.ranks - 1) + [self.fault]
        answers = await asyncio.gather(
            *(
                asyncio.to_thread(rank.take, offer, number, self.ranks, self.layout, fault)
                for number, (rank, fault) in enumerate(zip(self.processes, faults, strict=True))
            )
        )
        wrong = [answer for answer in answers if isinstance(answer, str)]
        if wrong:
            raise RuntimeError(wrong[0])
        _, _, self.held, self.bytes, self.came = (list(column) for column in zip(*answers, strict=True))
        return [WeightReceipt(self.name, version, digest, 0, 0) for version, digest, *_ in answers]

    def expected(self, weights):
        """The digest of what each rank has to hold of these weights."""
        found = []
        for rank in range(self.ranks):
            kept = {name: part(self.layout, name, one, rank, self.ranks) for name, one in weights.items()}
            found.append(digest_tensors((name, one) for name, one in kept.items() if one is not None))
        return found


__all__ = ["CONTEXT", "OUTSIDE", "LayoutReplica"]
