"""The digest of weights in host memory, at the speed at which a core reads it (`hone.models.digest` has the contract).

    a tensor's bytes --> XXH3, 128 bits, seeded with BLAKE2b of [name, dtype, shape] --> added up modulo 2**128

XXH3 is a hash of few instructions for each 64 bytes, the same on every processor (https://xxhash.com). The seed ties
bytes to their name: two tensors that change places change both terms of the sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import torch
import xxhash
from torch import Tensor

from hone.models.packed import Entry, memory, pack


class BytesOfTensor:
    """A `PartDigest`."""

    def __init__(self, seed: int) -> None:
        self._hash = xxhash.xxh3_128(seed=seed)

    def take(self, data: Tensor) -> None:
        data = data.cpu()
        self._hash.update(memory(data))

    def total(self) -> int:
        return self._hash.intdigest()


class ByteDigest:
    """A `WeightDigest`; what lies on another device is copied to the host for it."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._total = 0
        self._open: list[BytesOfTensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        packed = pack([(name, tensor.detach().cpu())])
        self.add_packed(packed.data, packed.entries)

    def add_many(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.add(name, tensor)

    def add_packed(self, data: Tensor, entries: Iterable[Entry]) -> None:
        data = data.cpu()
        there, hashed, total = memory(data), xxhash.xxh3_128_intdigest, 0
        for name, dtype, shape, begin, size in entries:
            self._begin(name)
            total += hashed(there[begin : begin + size], _seed(name, dtype, shape))
        self._total += total

    def open(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> BytesOfTensor:
        self._begin(name)
        found = BytesOfTensor(_seed(name, dtype, shape))
        self._open.append(found)
        return found

    def hexdigest(self) -> str:
        total = self._total + sum(one.total() for one in self._open)
        return f"{total % (1 << 128):032x}"

    def _begin(self, name: str) -> None:
        if name in self._names:
            raise ValueError(f"the tensor {name!r} comes twice in one digest")
        self._names.add(name)


@lru_cache(maxsize=1 << 16)  # the same tensors at every sync
def _seed(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    header = json.dumps([name, str(dtype).removeprefix("torch."), shape])
    return int.from_bytes(blake2b(header.encode(), digest_size=8).digest(), "little")
