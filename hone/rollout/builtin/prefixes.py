"""KV of prompts that later requests continue: kept in blocks of tokens, found again by all tokens up to the block.

    request ends --keep--> blocks of its prompt --recall--> row of a request that begins with the same tokens

Only KV that a prefill wrote is kept, in whole blocks, and a prefill attends block by block (`KVCache.attend_prompts`).
So each block is computed from the same tokens by the same calls, whether earlier blocks were kept or not, and on a CPU
the answers are the same to the bit. Tokens that were sampled are prefilled once, as part of the next prompt.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.data.routes import Routes

BLOCK = 32  # tokens; torch's CPU kernel computes so many queries at a time

Root = tuple[str, bool, str]  # the adapter, whether the experts of the tokens are recorded, and the owner


@dataclass(frozen=True, slots=True)
class Block:
    """KV of BLOCK tokens."""

    number: int  # of this block among all; what follows it is found by it
    tensors: tuple[Tensor, ...]  # [layers, kv_heads, BLOCK, size] each: keys and values of layers of each shape
    routes: Routes | None  # [BLOCK, layers, top_k]


class Prefixes:
    """Blocks by the block before them and their own tokens; the longest unused is dropped first."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens // BLOCK
        self._blocks: OrderedDict[tuple[int | Root, tuple[int, ...]], Block] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def bytes(self) -> int:
        one = next(iter(self._blocks.values()), None)
        return 0 if one is None else len(self._blocks) * sum(kept.nbytes for kept in one.tensors)

    def clear(self) -> None:
        """Drop everything: the weights change, or the memory is needed."""
        self._blocks.clear()

    def find(self, root: Root, tokens: tuple[int, ...]) -> list[Block]:
        """Find the blocks that `tokens` begins with."""
        found: list[Block] = []
        before: int | Root = root
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = self._blocks.get((before, tokens[start : start + BLOCK]))
            if block is None:
                break
            found.append(block)
            before = block.number
        self._used(root, tokens, found)
        return found

    def keep(self, root: Root, tokens: tuple[int, ...], tensors: Sequence[Tensor], routes: Routes | None) -> None:
        """Copy the whole blocks of `tokens` that are not there yet.

        tensors [layers, kv_heads, len(tokens) or more, size] each; routes [len(tokens) or more, layers, top_k].
        """
        found = self.find(root, tokens)
        for start in range(len(found) * BLOCK, min(len(tokens) // BLOCK, self._most) * BLOCK, BLOCK):
            cut = slice(start, start + BLOCK)
            copies = tuple(one[:, :, cut].clone() for one in tensors)
            block = Block(next(self._numbers), copies, None if routes is None else routes[cut].copy())
            self._blocks[found[-1].number if found else root, tokens[cut]] = block
            found.append(block)
        self._used(root, tokens, found)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def _used(self, root: Root, tokens: tuple[int, ...], blocks: list[Block]) -> None:
        """Note a use; of the blocks of one prompt, the last ones are dropped first."""
        for at in reversed(range(len(blocks))):
            before = blocks[at - 1].number if at else root
            self._blocks.move_to_end((before, tokens[at * BLOCK : (at + 1) * BLOCK]))


def joined(blocks: list[Block]) -> tuple[list[Tensor], Routes | None]:
    """Join blocks of one prompt along their tokens; there is at least one."""
    routes = [block.routes for block in blocks if block.routes is not None]
    tensors = [torch.cat(parts, 2) for parts in zip(*(one.tensors for one in blocks), strict=True)]
    return tensors, np.concatenate(routes) if routes else None


__all__ = ["BLOCK", "Block", "Prefixes", "Root", "joined"]
