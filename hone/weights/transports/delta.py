"""Send only elements that changed since the last sync, bit for bit, over another transport.

    sender: copy of version 4 --.                     receiver: copy of version 4, with its digest
            weights of version 5 --> changed elements ========> written into the copy --> all tensors, complete

A receiver reports which version it holds, by number and digest. The sender sends changes only if every receiver holds
exactly the version that it compared with; otherwise, and in one of `anchor_every` syncs, it sends all weights (an
anchor). So a delta is never applied to another base, even if a replica missed a sync or was restarted. The result is
verified against the sender's digest before it becomes the next base.

Both sides keep a copy of the weights in host memory. An unchanged tensor costs two empty entries. A tensor is sent
whole when its delta would be larger.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.weights import ANCHOR_EVERY, TRANSPORTS
from hone.weights.base import (
    Arrival,
    CheckpointEngine,
    Intake,
    NamedTensor,
    NamedTensors,
    Offer,
    Payload,
    Sent,
    WeightReceiver,
    WeightSyncError,
)
from hone.weights.digests.digest import new_digest
from hone.weights.digests.packed import pack, size_of
from hone.weights.transports.bucketed.sync import BucketedEngine
from hone.weights.transports.bucketed.wire import expect

HEAD, TAIL = "\0head", "\0tail"
INDEX, MASK, VALUE = "\0index", "\0mask", "\0value"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(slots=True)
class _Base:
    """The weights of the last sync."""

    name: str  # version and digest
    tensors: dict[str, Tensor]
    since_anchor: int


class DeltaEngine(CheckpointEngine):
    """Sends only the changed elements of each tensor, over another transport."""

    transport = "delta"

    def __init__(
        self,
        bucket_bytes: int,
        timeout_s: float,
        token: str,
        over: str = "collective",
        anchor_every: int = ANCHOR_EVERY,
        **of_carrier: Any,
    ) -> None:
        """`over`: the transport that carries it, one with a control channel (collective, ipc), with its options."""
        super().__init__(bucket_bytes, timeout_s, token)
        if anchor_every < 1:
            raise ValueError(f"anchor_every should be at least 1, found {anchor_every}")
        carrier = TRANSPORTS.get(over)
        if not issubclass(carrier, BucketedEngine):
            raise ValueError(
                f"delta cannot use the transport {over}, which has no control channel; use collective or ipc"
            )
        self._over = over
        self.all_or_none = carrier.all_or_none
        self._carrier: BucketedEngine = carrier(bucket_bytes, timeout_s, token, **of_carrier)
        self._anchor_every = anchor_every
        self._base: _Base | None = None

    def build_topology(self, ranks: Mapping[str, int]) -> None:
        self._carrier.build_topology(ranks)

    def prepare(self, version: int, payload: Payload) -> Offer:
        offer = self._carrier.prepare(version, payload)
        return replace(offer, transport=self.transport, address={"over": self._over, "address": offer.address})

    async def init_process_group(self) -> None:
        await self._carrier.init_process_group()

    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        base, self._base = self._base, None  # if anything fails from here on, the next sync is an anchor
        held = {peer.facts.get("holds") for peer in self._carrier.channel.left()}
        if base is not None and (held != {base.name} or base.since_anchor + 1 >= self._anchor_every):
            base = None
        encoder = _Encoder(weights, base)
        sent = await self._carrier.send_weights(encoder.stream(), version)
        digest = encoder.digest.hexdigest()
        self._base = _Base(f"{version}:{digest}", encoder.tensors, 0 if base is None else base.since_anchor + 1)
        return replace(sent, digest=digest, tensors=len(encoder.tensors))

    def drop(self, replica: str, reason: str) -> None:
        self._carrier.drop(replica, reason)

    async def finalize(self) -> None:
        await self._carrier.finalize()

    async def close(self) -> None:
        self._base = None
        await self._carrier.close()

    @classmethod
    def receiver(cls, offer: Offer, rank: int, token: str) -> WeightReceiver:
        return DeltaReceiver(offer, rank, token)


class DeltaReceiver(WeightReceiver):
    """A rank's side. Its process keeps the copy from one sync to the next."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        super().__init__(offer, rank, token)
        over, address = offer.address.get("over"), offer.address.get("address")
        if not isinstance(over, str) or over == DeltaEngine.transport or not isinstance(address, Mapping):
            raise WeightSyncError(f"an offer of delta over {over!r}")
        inner = replace(offer, transport=over, address=address)
        self._carrier: WeightReceiver = TRANSPORTS.get(over).receiver(inner, rank, token)
        self._tensors: dict[str, Tensor] = {}

    def init_process_group(self) -> None:
        self._carrier.holds = next(iter(_kept), "")
        self._carrier.init_process_group()

    def stream(self, intake: Intake) -> Iterator[Arrival]:
        held = dict(_kept)
        _kept.clear()  # while it is being changed it is no base, until it is complete and verified
        carried = itertools.chain.from_iterable(came.tensors for came in self._carrier.stream(Intake()))
        head = _json(carried, HEAD)
        expect({"type": "head", **head}, base=str)
        if head["base"] and head["base"] not in held:
            raise WeightSyncError(
                f"{self.offer.replica}/{self.rank} was sent changes of {head['base']}, it holds "
                f"{next(iter(held), 'nothing')}"
            )
        old = held.get(head["base"], {})
        for name, tensor in carried:
            if name == TAIL:
                self.expected = bytes(tensor.tolist()).decode()
                continue
            plain, mark, kind = name.partition("\0")
            whole = _apply(plain, old.get(plain), mark + kind, tensor, carried) if mark else tensor.cpu().clone()
            self._tensors[plain] = whole
            yield intake.take(pack([(plain, whole.clone() if intake.copy else whole)]))

    def finalize(self, failure: str = "", digest: str = "") -> None:
        if not failure:
            _kept[f"{self.offer.version}:{digest}"] = self._tensors
        self._carrier.finalize(failure, digest)


_kept: dict[str, dict[str, Tensor]] = {}  # name of a base -> its tensors; at most one


def _json(carried: Iterator[NamedTensor], name: str) -> dict[str, Any]:
    found, tensor = next(carried, ("", torch.empty(0)))
    if found != name:
        raise WeightSyncError(f"a delta begins with {found[:80]!r}")
    try:
        head = json.loads(bytes(tensor.tolist()))
    except (ValueError, TypeError) as error:
        raise WeightSyncError(f"the first tensor of a delta is not JSON: {error}") from error
    return head if isinstance(head, dict) else {}


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements as integers, to compare bits (NaN and -0.0 too)."""
    return tensor.reshape(-1).view(_WORDS[tensor.element_size()])


class _Encoder:
    """The stream of changes, and its totals."""

    def __init__(self, weights: NamedTensors, base: _Base | None) -> None:
        self._weights = weights
        self._base = base
        self.tensors: dict[str, Tensor] = {}
        self.digest = new_digest("bytes")

    def stream(self) -> Iterator[NamedTensor]:
        old = self._base.tensors if self._base is not None else {}
        yield HEAD, _bytes(json.dumps({"base": self._base.name if self._base is not None else ""}))
        for name, tensor in self._weights:
            if "\0" in name:
                raise ValueError(f"a weight's name holds a zero character: {name!r}")
            new = tensor.detach().cpu().contiguous()
            self.digest.add(name, new)
            before = old.get(name)
            if before is not None and before.dtype == new.dtype and before.shape == new.shape:
                yield from _changes(name, before, new)
                _words(before).copy_(_words(new))
                self.tensors[name] = before
            else:
                self.tensors[name] = new.clone()
                yield name, new
        yield TAIL, _bytes(self.digest.hexdigest())


def _changes(name: str, before: Tensor, new: Tensor) -> Iterator[NamedTensor]:
    """Changed positions and values; positions as numbers or one bit per element. Or the whole tensor, if smaller."""
    words = _words(new)
    differs = words != _words(before)
    count = int(differs.sum())
    position = torch.int32 if words.numel() < 1 << 31 else torch.int64
    costs = {INDEX: count * position.itemsize, MASK: (words.numel() + 7) // 8}
    best = min(costs, key=lambda kind: costs[kind])
    if costs[best] + count * words.element_size() >= size_of(new):
        yield name, new
        return
    if best == INDEX:
        yield name + INDEX, differs.nonzero().view(-1).to(position)
    else:
        yield name + MASK, torch.from_numpy(np.packbits(differs.numpy()))
    yield name + VALUE, words[differs]


def _apply(name: str, old: Tensor | None, kind: str, where: Tensor, carried: Iterator[NamedTensor]) -> Tensor:
    """Write changes into the old tensor. Raises WeightSyncError if they do not fit it."""
    if old is None or kind not in (INDEX, MASK):
        raise WeightSyncError(f"a change of {name!r} came, of which there is no earlier version")
    words = _words(old)
    if kind == MASK:
        if where.dtype != torch.uint8 or where.numel() != (words.numel() + 7) // 8:
            raise WeightSyncError(f"the changes of {name!r} are for a tensor of another size")
        where = torch.from_numpy(np.unpackbits(where.cpu().numpy(), count=words.numel())).nonzero().view(-1)
    where = where.cpu().long().clone()  # the next tensor may overwrite its memory
    found, values = next(carried, ("", where))
    fits = where.numel() == values.numel() and values.dtype == words.dtype
    if found != name + VALUE or not fits:
        raise WeightSyncError(f"the changes of {name!r} are followed by {found[:80]!r}")
    if where.numel() and not (int(where.min()) >= 0 and int(where.max()) < words.numel()):
        raise WeightSyncError(f"the changes of {name!r} reach beyond its {words.numel()} elements")
    words[where] = values.cpu()
    return old
