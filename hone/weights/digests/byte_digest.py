"""XXH3 digest of weights in host memory, at the speed at which a core reads them (interface: `digest.py`).

    a tensor's bytes --> XXH3, 128 bits, seeded with BLAKE2b of [name, dtype, shape] --> added up modulo 2**128

XXH3 takes few instructions per 64 bytes and gives the same result on every processor (https://xxhash.com). The seed
binds bytes to their name: if two tensors are swapped, both terms of the sum change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import torch
import xxhash
from torch import Tensor

from hone.weights.digests.packed import Entry, memory, pack


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
    """A `WeightDigest`. Tensors on other devices are copied to the host."""

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
            raise ValueError(f"the tensor {name!r} was added twice to one digest")
        self._names.add(name)


@lru_cache(maxsize=1 << 16)  # every sync has the same tensors
def _seed(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    header = json.dumps([name, str(dtype).removeprefix("torch."), shape])
    return int.from_bytes(blake2b(header.encode(), digest_size=8).digest(), "little")
