"""The weights of one version: as the trainer holds them (`Live`), or an immutable copy in host memory (`Snapshot`).

    trainer's thread   Snapshot.of(source, version): copy, digest    train ...........................
    loop's thread                                                    send | send again to a replica that restarted

The live tensors are never read while training runs. After each send `is_current` says whether what was sent is still
this version, so weights that were changed meanwhile never count as sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hone.weights.base import Adapter, NamedTensors, WeightSyncError
from hone.weights.digests.digest import digest_tensors, new_digest

StreamFn = Callable[[], NamedTensors]
"""Function that starts a new stream of tensors."""


@dataclass(frozen=True, slots=True)
class Source:
    """The weights that the trainer has to send."""

    whole: StreamFn  # every weight, without an adapter that is sent separately
    adapter: tuple[StreamFn, Adapter] | None = None  # tensors and description of a separate adapter


class VersionWeights(Protocol):
    """The weights of one version, to be sent."""

    @property
    def version(self) -> int: ...

    def source(self) -> Source: ...

    async def is_current(self) -> bool:
        """Return whether the tensors are still of this version. Raises WeightSyncError if nothing may change them."""


@dataclass(frozen=True, slots=True)
class Live:
    """The tensors that the trainer trains: they are sent while it waits."""

    version: int
    weights: Source
    is_unchanged: Callable[[], bool]  # whether the trainer has made no update since

    def source(self) -> Source:
        return self.weights

    async def is_current(self) -> bool:
        return self.is_unchanged()


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of named tensors in host memory, and the digest that they had when they were copied."""

    tensors: Mapping[str, torch.Tensor]
    digest: str

    @classmethod
    def of(cls, stream: NamedTensors) -> Copied:
        """Copy a stream; each tensor is digested right after it was copied. Raises ValueError for a repeated name."""
        digest = new_digest("bytes")
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in stream:
            copy = tensor.detach().to("cpu", copy=True).contiguous()
            digest.add(name, copy)
            tensors[name] = copy
        return cls(tensors, digest.hexdigest())

    def stream(self) -> NamedTensors:
        return self.tensors.items()

    @property
    def is_whole(self) -> bool:
        """Return whether the tensors are still those that were copied."""
        return digest_tensors(self.tensors.items(), "bytes") == self.digest


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one version."""

    version: int
    whole: Copied
    adapter: tuple[Copied, Adapter] | None = None

    @classmethod
    def of(cls, source: Source, version: int, earlier: Snapshot | None = None) -> Snapshot:
        """Copy the weights. The base of a separate adapter never changes, so it comes from an `earlier` snapshot."""
        if source.adapter is None:
            return cls(version, Copied.of(source.whole()))
        stream, adapter = source.adapter
        has_base = earlier is not None and earlier.adapter is not None
        whole = earlier.whole if earlier is not None and has_base else Copied.of(source.whole())
        return cls(version, whole, (Copied.of(stream()), adapter))

    def source(self) -> Source:
        if self.adapter is None:
            return Source(self.whole.stream)
        copied, adapter = self.adapter
        return Source(self.whole.stream, (copied.stream, adapter))

    async def is_current(self) -> bool:
        """Return True. Raises WeightSyncError if a tensor has changed since it was copied."""
        await asyncio.to_thread(self._verify)
        return True

    def _verify(self) -> None:
        parts = [self.whole, *([self.adapter[0]] if self.adapter is not None else [])]
        if not all(part.is_whole for part in parts):
            raise WeightSyncError(
                f"the snapshot of weight version {self.version} was changed while it was kept: replicas may have "
                "received parts of two versions"
            )
