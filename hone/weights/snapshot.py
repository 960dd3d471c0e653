"""An immutable copy of the weights of one version, in host memory.

    trainer's thread   Snapshot.of(source, version): copy, digest    train ...........................
    loop's thread                                                    send | send again to a replica that restarted

The trainer's own tensors are never read while training runs. Nothing may change a copy, and after each send its digest
proves that nothing has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hone.weights.base import AdapterTensors, NamedTensors, Source, VersionWeights, WeightSyncError
from hone.weights.digests.digest import digest_tensors, new_digest


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
    adapter: tuple[Copied, AdapterTensors] | None = None

    @classmethod
    def of(cls, source: Source, version: int, earlier: Snapshot | None = None) -> Snapshot:
        """Copy the weights. The base of a separate adapter never changes, so it comes from an `earlier` snapshot."""
        if source.adapter is None:
            return cls(version, Copied.of(source.whole()))
        stream, adapter = source.adapter
        has_base = earlier is not None and earlier.adapter is not None
        whole = earlier.whole if earlier is not None and has_base else Copied.of(source.whole())
        return cls(version, whole, (Copied.of(stream()), adapter))

    def weights(self) -> VersionWeights:
        if self.adapter is None:
            return VersionWeights(self.version, Source(self.whole.stream), self.is_whole)
        copied, adapter = self.adapter
        return VersionWeights(self.version, Source(self.whole.stream, (copied.stream, adapter)), self.is_whole)

    def is_whole(self) -> bool:
        """Return True. Raises WeightSyncError if a tensor has changed since it was copied."""
        parts = [self.whole, *([self.adapter[0]] if self.adapter is not None else [])]
        if not all(part.is_whole for part in parts):
            raise WeightSyncError(
                f"the snapshot of weight version {self.version} was changed while it was kept: replicas may have "
                "received parts of two versions"
            )
        return True
