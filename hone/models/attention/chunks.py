"""Attention within chunks of a sequence (Llama 4): a token sees the tokens before it in its chunk.

A packed row cut at the ends of chunks is a packed row again, whose segments are chunks. So every kernel computes them,
without a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence


def chunks(lengths: Sequence[int], parents: Sequence[int | None], size: int) -> tuple[list[int], list[int | None]]:
    """Bounds and parents of the chunks of segments, as `Packing.of` takes them.

    Where a shared prefix ends inside a chunk, its part of that chunk is the prefix of what follows.
    """
    ends: list[int] = [0]
    found: list[int | None] = []
    open_chunks: dict[int, int] = {}  # segment -> its last chunk, where answers go on with it
    for segment, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        place = before = 0 if parent is None else lengths[parent]
        while place < before + length:
            found.append(open_chunks.get(parent) if parent is not None and place == before else None)
            end = min((place // size + 1) * size, before + length)
            ends.append(ends[-1] + end - place)
            place = end
        if parent is None and length % size:
            open_chunks[segment] = len(found) - 1
    return ends, found


def pieces(start: int, length: int, most: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    """Cut `length` queries from position `start` on into pieces of at most `most` queries, each of one chunk."""
    ends = {*range(most, length, most), length}
    if chunk is not None:
        ends |= {end - start for end in range(chunk, start + length, chunk) if end > start}
    yield from itertools.pairwise([0, *sorted(ends)])
