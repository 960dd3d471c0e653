"""A digest of weights: two replicas that serve the same tensors say the same 32 hexadecimal digits.

    tensor --8-byte words--> keyed mixing, summed per block of 32,768 words --> (two 64-bit sums per block)
        --> BLAKE2b(name, dtype, shape, sums) per tensor --> BLAKE2b over the tensors, sorted by name

The arithmetic is integer arithmetic modulo 2**64 on the tensor's own device, so the result is the same on every device
and only 16 bytes per 256 KiB travel to the host. The first sum is linear in bijective images of the words: a change
confined to one 8-byte word (a flipped bit, one wrong element) always changes it. The second sums strongly mixed words,
whose key depends on the position: for changes that touch several words (swapped elements, swapped rows, a stale
tensor) it misses one in about 2**62 by chance. The digest guards against faults, not against forgery: an adversary
who knows this file can construct a collision.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

_BLOCK = 32_768  # words of 8 bytes: a block and its two work areas stay in a core's second-level cache
_BLOCKS_AT_ONCE = {"cpu": 1}  # on an accelerator fewer, larger launches are faster; the result is the same
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687  # the odd multipliers of splitmix64, as signed 64-bit


class WeightDigest:
    """The digest of tensors that come one at a time, on their way to somewhere else.

    Sensitive to every name, dtype, shape, and to every bit and its position (NaN payloads and -0.0 included);
    the order in which tensors are added does not matter.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor (any dtype, shape, device, strides). Raises ValueError if the name was there before."""
        if name in self._parts:
            raise ValueError(f"the tensor {name!r} comes twice in one digest")
        header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0"
        self._parts[name] = (header, _block_sums(tensor.detach()))

    def hexdigest(self) -> str:
        """32 hexadecimal digits for everything added so far."""
        total = blake2b(digest_size=16)
        for name in sorted(self._parts):
            header, sums = self._parts[name]
            total.update(blake2b(header.encode() + sums.cpu().numpy().tobytes(), digest_size=16).digest())
        return total.hexdigest()


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of named tensors, whatever order they come in; see `WeightDigest`."""
    digest = WeightDigest()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hexdigest()


def _block_sums(tensor: Tensor) -> Tensor:
    """[blocks, 2] int64: both sums of each block of the tensor's bytes, the last block padded with zero bytes."""
    words = _words(tensor)
    step = _BLOCK * _BLOCKS_AT_ONCE.get(tensor.device.type, 256)
    parts = [_sums(words[start : start + step]) for start in range(0, words.numel(), step)]
    return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as 8-byte words; a copy is made only where the memory cannot be viewed so."""
    flat = tensor.contiguous().view(-1)
    raw = flat.view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        padded = torch.zeros((raw.numel() + 7) // 8 * 8, dtype=torch.uint8, device=raw.device)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


def _sums(words: Tensor) -> Tensor:
    """[blocks, 2]: sums of the keyed words and of their mixtures; only the last block may be short."""
    keys = _keys(words.device)
    whole = words.numel() // _BLOCK * _BLOCK
    parts = []
    if whole:
        parts.append(_mix(words[:whole].view(-1, _BLOCK), keys))
    if whole < words.numel():
        parts.append(_mix(words[None, whole:], keys[: words.numel() - whole]))
    return torch.cat(parts)


def _mix(words: Tensor, keys: Tensor) -> Tensor:
    mixed = words ^ keys
    mixed *= _FIRST
    linear = mixed.sum(1)
    shifted = mixed >> 31
    mixed ^= shifted
    mixed *= _SECOND
    torch.bitwise_right_shift(mixed, 29, out=shifted)
    mixed ^= shifted
    return torch.stack([linear, mixed.sum(1)], 1)


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """[_BLOCK] int64, one pseudo-random key per position in a block (splitmix64 of the position)."""
    keys = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device) * _FIRST
    for multiplier in (_SECOND, _FIRST):
        keys ^= (keys >> 30) & 0x3FFFFFFFF
        keys *= multiplier
    return keys
