"""Weights in two forms: Megatron's parameters in its buffers, and masters under Hugging Face names.

    parameters (compute_dtype) in buffers --forward, backward--> gradients (float32) in buffers
         ^                                                             | reduce-scatter over data-parallel ranks
         '--all-gather-- masters (model.dtype): this rank's share <----' `settle`

A rank's share of a buffer is a flat range (ZeRO-1). The part of it that belongs to one box of one Hugging Face weight
is cut into at most three rectangles, each a master of its own, with its gradient as a view of the buffer. So hone's
optimizers and checkpoints see named boxes, and no memory is used twice. With equal dtypes, masters are views too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor, nn

from hone.engines.parts import CastFn, Part, Piece
from hone.engines.rebuilt.reading import Reader
from hone.models.numerics.precision import state_buffers
from hone_megatron.mesh import MegatronRanks
from hone_megatron.moving import Buffers, relocate
from hone_megatron.names import Box

BUCKET_BYTES = 128 * 2**20  # of whole tensors that one collective gathers
ALIGNMENT = 8  # bytes: tensors of several dtypes share a collective
Table = Mapping[nn.Parameter, Sequence[Box]]


@dataclass(frozen=True, slots=True)
class BoxShard:
    """One box of a whole tensor (a `parts.Shard`), or none of it."""

    shape: tuple[int, ...]
    box: Piece | None
    is_owner: bool

    def pieces(self) -> list[Piece]:
        return [] if self.box is None else [self.box]

    def local_shape(self) -> list[int]:
        return [0] * len(self.shape) if self.box is None else list(self.box.shape)


@dataclass(slots=True)
class Held:
    """A rectangle of a weight that this rank updates."""

    box: Box
    master: Tensor  # in the shape of the rectangle
    working: Tensor  # the same elements of Megatron's parameter
    gradient: Tensor | None  # the same elements of Megatron's gradient buffer; None: it is never trained
    shard: BoxShard


class MegatronWeights:
    """The weights of one engine; implements `hone.engines.parts.Weights`."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        table: Table,
        skeleton: nn.Module,
        ranks: MegatronRanks,
        dtype: torch.dtype,
    ) -> None:
        """`parts` are this rank's parts of the model, wrapped for training or plain; the masters have `dtype`.

        `skeleton` is the transformers model on the meta device, but with its buffers (see `read_buffers`). Its weights
        without `requires_grad` are frozen: they have no masters.
        """
        self._parts = parts
        self._table = table
        self._ranks = ranks
        self._dtype = dtype
        self._device = next(self._parts[0].parameters()).device  # of collectives, wherever the weights are
        self._memory = Buffers(parts, self._device)
        self._working_dtype = next(iter(table)).dtype
        self._shapes, self._aliases = _names_of(skeleton)
        self._buffers = dict(state_buffers(skeleton))
        self._learning = {name for name, weight in skeleton.named_parameters() if weight.requires_grad}
        self._held = [*(self._of_buffers(table) if self._is_trained else ()), *self._of_parameters(table)]
        trained = [held for held in self._held if held.gradient is not None]
        self.masters = {f"{i} {held.box.name}": held.master for i, held in enumerate(trained)}
        if self._is_trained and not trained:  # an adapter has nothing on this rank, whose optimizer steps all the same
            self.masters["nothing"] = nn.Parameter(torch.empty(0, dtype=dtype, device=self._device))
        here = {held.box.name for held in self._held}
        self._absent = [
            (name, torch.empty([0] * len(shape), dtype=self._dtype_of(name)), BoxShard(shape, None, False))
            for name, shape in self._shapes.items()
            if name not in here
        ]

    @property
    def _is_trained(self) -> bool:
        return isinstance(self._parts[0], DistributedDataParallel)

    def _of_buffers(self, table: Table) -> Iterator[Held]:
        """This rank's share of each buffer."""
        for buffer in self._memory:
            for parameter, mine in _shares(buffer):
                begin, end, _ = buffer.param_index_map[parameter]
                data, grad = buffer.param_data[begin:end], buffer.grad_data[begin:end]
                for box in table[parameter]:
                    yield from self._rectangles(box, parameter, mine, data, grad)

    def _of_parameters(self, table: Table) -> Iterator[Held]:
        """Whole parameters, which nothing trains; data-parallel ranks hold the same, and the first owns them."""
        for parameter, boxes in table.items():
            for box in boxes if not parameter.requires_grad else ():
                yield from self._rectangles(box, parameter, (0, parameter.numel()), parameter.data.view(-1), None)

    def _rectangles(
        self, box: Box, parameter: Tensor, mine: tuple[int, int], data: Tensor, grad: Tensor | None
    ) -> Iterator[Held]:
        columns = parameter[0].numel()
        first, last = max(mine[0], box.rows[0] * columns), min(mine[1], box.rows[1] * columns)
        is_expert = not getattr(parameter, "allreduce", True)
        is_first = self._ranks.is_first_expert_copy if is_expert else self._ranks.is_first_copy
        is_owner = box.is_owner and (grad is not None or is_first)
        for start, stop, piece in rectangles(first, last, box, columns):
            working = data[start:stop].view(piece.shape)
            dtype = self._dtype_of(box.name)
            same = working.dtype == dtype
            master = nn.Parameter(working if same else working.to(dtype), requires_grad=grad is not None)
            gradient = None if grad is None else grad[start:stop].view(piece.shape)
            yield Held(box, master, working, gradient, BoxShard(box.whole, piece, is_owner))

    @torch.no_grad()
    def read(self, reader: Reader) -> None:
        """Set parameters and masters to the values of a model's files."""
        of_box: dict[Box, list[Held]] = {}
        for held in self._apart():
            of_box.setdefault(held.box, []).append(held)
        for parameter, boxes in self._table.items():
            parameter.zero_()  # padding of the vocabulary
            for box in boxes:
                rows = parameter[box.rows[0] : box.rows[1]]
                values = reader.read(box)
                rows.copy_(values.view(rows.shape))
                for held in of_box.get(box, ()):
                    held.master.copy_(values[_within(held.shard, box.offset)])

    # ------------------------------------------------------------------------------------------------------- training

    def collect(self) -> None:
        """Megatron's hooks have added gradients to the buffers."""
        self._memory.is_cleared = False

    def settle(self) -> None:
        """Sum gradients over the ranks that share a weight: data, context, tensor (norms), stages (tied head)."""
        finalize_model_grads(list(self._parts), None)
        for held in self._held:
            held.master.grad = None if held.gradient is None else held.gradient.to(held.master.dtype)

    def gradient_norm(self) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for held in self._held:
            if held.shard.is_owner and held.gradient is not None:
                square = torch.linalg.vector_norm(held.gradient).double().square()
                total = total.to(square.device) + square
        return math.sqrt(float(self._ranks.sum(total.to(self._device))))

    def clear_gradients(self) -> None:
        for part in self._parts:
            part.zero_grad_buffer()  # type: ignore[operator]
        self._memory.is_cleared = True
        for held in self._held:
            held.master.grad = None

    @torch.no_grad()
    def publish(self, names: frozenset[str] | None = None) -> None:
        apart = self._apart()
        if apart:
            torch._foreach_copy_([held.working for held in apart], [held.master for held in apart])
        if self._is_trained:
            for part in self._parts:
                part.start_param_sync(force_sync=True)  # type: ignore[operator]

    # -------------------------------------------------------------------------------------------------------- reading

    def parts(self) -> Iterator[Part]:
        for held in self._held:
            yield held.box.name, held.master.detach(), held.shard
        yield from self._absent

    def trained(self) -> Iterator[Part]:
        for held in self._held:
            if held.gradient is not None:
                yield held.box.name, held.master, held.shard
        yield from (part for part in self._absent if part[0] in self._learning)

    def chosen(self, names: frozenset[str]) -> dict[str, Tensor]:
        return dict(self._gathered([name for name in self._shapes if name in names]))

    def whole(self, cast: CastFn | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._gathered(list(self._shapes), cast):
            yield name, tensor
            for alias in self._aliases[name]:
                yield alias, tensor.clone()
        for name, buffer in self._buffers.items():
            yield name, (buffer if cast is None else cast(name, buffer)).clone()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Whole gradients after `settle`, for comparisons with another engine. Every rank takes all of them."""
        return self._gathered(list(self._shapes), gradients=True)

    @torch.no_grad()
    def _gathered(
        self, names: Sequence[str], cast: CastFn | None = None, gradients: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, bucket by bucket: owners lay their boxes into zeros, and a sum of integers joins them."""
        own: dict[str, list[Held]] = {}
        for held in self._held:
            if held.shard.is_owner:
                own.setdefault(held.box.name, []).append(held)
        stored = {name: torch.float32 if gradients else self._stored_dtype(name) for name in names}
        if cast is not None:
            stored = {name: cast(name, torch.empty(0, dtype=dtype)).dtype for name, dtype in stored.items()}
        sizes = {name: math.prod(self._shapes[name]) * stored[name].itemsize for name in names}
        for bucket in _buckets(names, sizes):
            places = [-(-sizes[name] // ALIGNMENT) * ALIGNMENT for name in bucket]
            flat = torch.zeros(sum(places), dtype=torch.uint8, device=self._device)
            tensors = [
                one[: sizes[name]].view(stored[name]).view(self._shapes[name])
                for name, one in zip(bucket, flat.split(places), strict=True)
            ]
            for name, tensor in zip(bucket, tensors, strict=True):
                for held in own.get(name, ()):
                    tensor[_within(held.shard)] = held.gradient if gradients else held.master
            if self._ranks.world > 1:
                dist.all_reduce(flat)  # bytes: one rank has a value, all others zeros
            yield from ((name, tensor.clone()) for name, tensor in zip(bucket, tensors, strict=True))

    def _dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a weight's master; a frozen weight has none but the one that computes."""
        return self._dtype if name in self._learning else self._working_dtype

    def _stored_dtype(self, name: str) -> torch.dtype:
        return self._dtype_of(name) if self._is_trained else self._working_dtype

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move weights (`model`), masters that are tensors of their own (`optimizer`) and gradients."""
        apart = self._apart()
        if model:
            here = {id(held) for held in apart}
            shared = (held.master for held in self._held if id(held) not in here)
            parameters = (parameter for part in self._parts for parameter in part.parameters())
            working = (held.working for held in self._held)
            relocate([*self._memory.weights(), *parameters, *working, *shared], device)
        if optimizer:
            relocate([held.master for held in apart], device)
        if grad and self._is_trained:
            views = [held.gradient for held in self._held if held.gradient is not None]
            self._memory.move_gradients(device, views)
        self._memory.forget_shards()

    @property
    def nbytes(self) -> int:
        """Return the bytes of weights, masters and gradients of this rank."""
        memory = {one.untyped_storage().data_ptr(): one for part in self._parts for one in part.parameters()}
        weights = sum(one.untyped_storage().nbytes() for one in memory.values())
        gradients: int = sum(buffer.grad_data.nbytes for buffer in self._memory)
        return weights + gradients + sum(held.master.nbytes for held in self._apart())

    def _apart(self) -> list[Held]:
        """The masters that are tensors of their own, because they are wider than what computes."""
        return [held for held in self._held if held.master.data_ptr() != held.working.data_ptr()]


def _shares(buffer: Any) -> Iterator[tuple[nn.Parameter, tuple[int, int]]]:
    """Every parameter of one of Megatron's buffers, and the flat range of it that is in this rank's share."""
    rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_world_size
    for bucket in buffer.buckets:
        share = bucket.grad_data.numel() // size
        first = bucket.offset + rank * share
        for parameter in bucket.params_list:
            begin, end, _ = buffer.param_index_map[parameter]
            yield parameter, (max(begin, first) - begin, min(end, first + share) - begin)


def rectangles(first: int, last: int, box: Box, columns: int) -> Iterator[tuple[int, int, Piece]]:
    """Cut the flat range [first, last) of a parameter, within a box, into rectangles: (begin, end, box of the whole).

    A range that begins and ends inside of rows is a part of a row, whole rows, and a part of a row.
    """
    origin = box.rows[0] * columns
    while first < last:
        row, column = divmod(first - origin, columns)
        if column or last - first < columns:
            rows, width = 1, min(last - first, columns - column)
        else:
            rows, width = (last - first) // columns, columns
        shape: tuple[int, ...] = (rows,) if len(box.shape) == 1 else (*(1,) * (len(box.shape) - 2), rows, width)
        within = (row,) if len(box.shape) == 1 else (*(0,) * (len(box.shape) - 2), row, column)
        offset = tuple(start + more for start, more in zip(box.offset, within, strict=True))
        yield first, first + rows * width, Piece(offset, shape, tuple(slice(0, length) for length in shape))
        first += rows * width


def _within(shard: BoxShard, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return the position of a shard in its whole tensor, or in a box of it that begins at `origin`."""
    assert shard.box is not None
    starts = [at - start for at, start in zip(shard.box.offset, origin or [0] * len(shard.shape), strict=True)]
    return tuple(slice(start, start + length) for start, length in zip(starts, shard.box.shape, strict=True))


def read_buffers(skeleton: nn.Module, reader: Reader, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Give a model on the meta device the buffers of its state dict, at least in float32. Every rank has all of them.

    The bias that balances DeepSeek-V3's experts is one: it is not trained, and saved and sent like a weight.
    """
    for name, empty in state_buffers(skeleton):
        shape = tuple(empty.shape)
        box = Box(name, shape, (0,) * len(shape), shape, (0, 0), True)
        path, _, key = name.rpartition(".")
        values = reader.read(box).to(device, torch.promote_types(dtype, torch.float32), copy=True)
        skeleton.get_submodule(path)._buffers[key] = values
    return dict(state_buffers(skeleton))


def _names_of(skeleton: nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, list[str]]]:
    """Shapes of all weights, tied ones once, and the other names of each."""
    names: dict[int, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
        shapes[name] = tuple(weight.shape)
    firsts = [same[0] for same in names.values()]
    return {name: shapes[name] for name in firsts}, {same[0]: same[1:] for same in names.values()}


def _buckets(names: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Neighbouring names whose tensors have together at most `BUCKET_BYTES`, or one larger tensor."""
    bucket: list[str] = []
    held = 0
    for name in names:
        if bucket and held + sizes[name] > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(name)
        held += sizes[name]
    if bucket:
        yield bucket
