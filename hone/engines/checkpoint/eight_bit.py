"""The state of an 8-bit optimizer on another mesh: dequantised, cut into the parts of this run, quantised again.

bitsandbytes keeps a moment as a code for each value and a float32 scale for each 256 codes in the order of a part's
memory, so other parts have other blocks. A value that is quantised again is rounded once more.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.engines.checkpoint.files import CheckpointError, PartsReader
from hone.engines.parts import Piece, Shard, Whole

CODEBOOK = "qmap"  # begin of the name of state that is the same for all weights
_BLOCK = 256  # values with one scale
_CODEBOOKS = {"state1": "dynamic", "state2": "udynamic"}  # as bitsandbytes calls them: with a sign, and without
_KNOWN = {f"{kind}{number}" for kind in ("state", "absmax", CODEBOOK) for number in "12"}


def part_name(shard: Shard) -> str:
    """Offset and shape of each box of a weight that a rank holds; empty if it holds all of it, or nothing."""
    pieces = shard.pieces()
    if [piece.shape for piece in pieces] == [shard.shape]:
        return ""
    boxes = ((",".join(map(str, one.offset)), ",".join(map(str, one.shape))) for one in pieces)
    return ";".join(f"{offset}+{shape}" for offset, shape in boxes)


def has_blocks(names: Iterable[str], part: str) -> bool:
    """Return whether the state of this part of a weight is among its stored tensors, or none of the weight at all."""
    stored = {_split(name)[2] for name in names if not _split(name)[1].startswith(CODEBOOK)}
    return not stored or part in stored


def recut(reader: PartsReader, names: Sequence[str], shard: Shard, optimizer: Any) -> dict[str, Tensor]:
    """A part's state as `optimizer` keeps it, on the CPU, from the stored tensors `names` of other parts of its weight.

    A part with fewer than `min_8bit_size` values is float32, as when the optimizer begins. Raises CheckpointError if
    the stored parts do not make up this one, or have other state than codes and scales.
    """
    if strange := sorted({_split(name)[1] for name in names} - _KNOWN):
        raise CheckpointError(
            f"{reader.where}: {strange[0]} of {_split(names[0])[0]} cannot be cut for another mesh; continue on as "
            "many ranks with the same backend.parallel, or begin a new run from an export of this checkpoint"
        )
    if "dynamic" not in optimizer.name2qmap:
        optimizer.fill_qmap()
    found: dict[str, Tensor] = {}
    for moment, codebook in _CODEBOOKS.items():
        stored = [name for name in names if _split(name)[1] == moment]
        if not stored:
            continue
        found[moment] = _values(reader, stored, shard)
        if math.prod(shard.local_shape()) >= optimizer.args.min_8bit_size:
            found |= _quantised(moment, found[moment], shard, optimizer.name2qmap[codebook].cpu())
    return found


def _values(reader: PartsReader, names: Sequence[str], shard: Shard) -> Tensor:
    """A moment of a part in float32: the local shape, behind a 2 where the moment holds two averages."""
    local, filled = torch.empty(0), 0
    for name in names:
        theirs = _boxes(_split(name)[2], shard.shape)
        common = [both for pair in itertools.product(theirs, shard.pieces()) if (both := _overlap(*pair))]
        if not common:
            continue
        values = _dequantised(reader, name)
        if not filled:
            averages = values.shape[: values.dim() - len(shard.shape)]
            local = torch.empty(*averages, *shard.local_shape())
        for there, here in common:
            local[here] = values[there]
            filled += math.prod(one.stop - one.start for one in here[1:])
    if filled != math.prod(shard.local_shape()):
        weight, moment, _ = _split(names[0])
        raise CheckpointError(f"{reader.where}: parts of {weight}/{moment} are missing")
    return local


def _dequantised(reader: PartsReader, name: str) -> Tensor:
    weight, moment, part = _split(name)
    codes = _read(reader, name)
    if codes.is_floating_point():
        return codes
    scales = _read(reader, f"{weight}/{moment.replace('state', 'absmax')}" + (f"@{part}" if part else ""))
    codebook = _read(reader, f"{weight}/{moment.replace('state', CODEBOOK)}")
    averages = scales.numel() // scales.shape[-1]  # each has blocks of its own
    pairs = zip(codes.view(averages, -1), scales.view(averages, -1), strict=True)
    found = [
        _kernels().dequantize_blockwise(one, absmax=scale, code=codebook, blocksize=_BLOCK) for one, scale in pairs
    ]
    return torch.stack(found).view(codes.shape)


def _quantised(moment: str, values: Tensor, shard: Shard, codebook: Tensor) -> dict[str, Tensor]:
    averages = values.shape[: values.dim() - len(shard.shape)]
    flat = values.view(math.prod(averages), -1)
    codes, states = zip(
        *(_kernels().quantize_blockwise(one, code=codebook, blocksize=_BLOCK) for one in flat), strict=True
    )
    scales = torch.stack([state.absmax for state in states])
    return {
        moment: torch.stack(codes).view(values.shape),
        moment.replace("state", "absmax"): scales.view(*averages, scales.shape[-1]),
        moment.replace("state", CODEBOOK): codebook,
    }


def _kernels() -> Any:
    return importlib.import_module("bitsandbytes.functional")  # optional; whoever has such an optimizer has it


def _read(reader: PartsReader, name: str) -> Tensor:
    if name not in reader.shapes:
        raise CheckpointError(f"{reader.where}: {name} is missing")
    return reader.read(name, Whole(reader.shapes[name], False))


def _split(name: str) -> tuple[str, str, str]:
    """Weight, key and part of the name of a stored tensor: "layer.weight/state1@16,0+16,32"."""
    weight, _, rest = name.rpartition("/")
    key, _, part = rest.partition("@")
    return weight, key, part


def _boxes(part: str, whole: tuple[int, ...]) -> list[Piece]:
    """The boxes that `part_name` named. They are every combination of runs along the dimensions, in local order."""
    if not part:
        return Whole(whole).pieces()
    boxes = [tuple(tuple(map(int, side.split(","))) for side in box.split("+")) for box in part.split(";")]
    starts: list[dict[int, int]] = []  # by dimension: start of a run in the whole tensor -> in the local one
    for dim in range(len(whole)):
        lengths = {offset[dim]: shape[dim] for offset, shape in boxes}
        starts.append(dict(zip(lengths, itertools.accumulate(lengths.values(), initial=0), strict=False)))
    found = []
    for offset, shape in boxes:
        local = [starts[dim][first] for dim, first in enumerate(offset)]
        found.append(Piece(offset, shape, tuple(slice(a, a + n) for a, n in zip(local, shape, strict=True))))
    return found


_Index = tuple[Any, ...]  # of a tensor: an ellipsis for averages, then a slice for each dimension of the weight


def _overlap(theirs: Piece, mine: Piece) -> tuple[_Index, _Index] | None:
    """The overlap of two boxes of a weight, as an index of the local tensor of each; None if there is none."""
    there, here = [], []
    for a, n, at, b, m, own in zip(
        theirs.offset, theirs.shape, theirs.at, mine.offset, mine.shape, mine.at, strict=True
    ):
        first, last = max(a, b), min(a + n, b + m)
        if first >= last:
            return None
        there.append(slice(at.start + first - a, at.start + last - a))
        here.append(slice(own.start + first - b, own.start + last - b))
    return (..., *there), (..., *here)
