"""The process groups of Megatron-Core: which ranks share matrices, tokens, stages, experts and batches.

    rank = ((stage * data + d) * context + c) * tensor + t                        (tensor varies fastest)

megatron-core keeps these groups in module variables, so all `megatron` engines that a process has at one time have the
same sizes. When all of them have ended, the next one may open others.
"""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hone.engines.base import JobRanks, deadline_of_groups, give_deadline
from hone.engines.vocabulary import VocabularyRanks
from hone.models.attention.sequence_parallel import SequenceRanks
from hone_megatron.settings import MegatronParallel, Sizes

KEYS = {"virtual": "virtual_pipeline"}  # a field of `Sizes` -> its key, where that is another word


@dataclass(frozen=True, slots=True)
class MegatronRanks(JobRanks):
    """This rank's view of the mesh; implements `hone.engines.base.Ranks`."""

    sizes: Sizes
    rank: int
    context: SequenceRanks | None  # the ranks that share this rank's micro-batches; None: no others
    tokens: SequenceRanks | None  # the ranks whose layers each have a slice of the row between the matrices

    @property
    def world(self) -> int:
        return self.sizes.world

    @property
    def token_ranks(self) -> int:
        """Into how many equal parts a row is cut."""
        return self.sizes.context * (self.sizes.tensor if self.sizes.sequence else 1)

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.sizes.tensor

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // (self.sizes.tensor * self.sizes.context) % self.sizes.data

    @property
    def data_parallel_size(self) -> int:
        return self.sizes.data

    @property
    def stage(self) -> int:
        return self.rank // (self.sizes.tensor * self.sizes.context * self.sizes.data)

    @property
    def is_output_rank(self) -> bool:
        """Return whether this is the first of the ranks that compute the same results, on the last stage."""
        is_last = self.stage == self.sizes.pipeline - 1
        return is_last and self.rank % (self.sizes.tensor * self.sizes.context) == 0

    @property
    def expert_rank(self) -> int:
        return int(parallel_state.get_expert_model_parallel_rank())

    @property
    def expert_tensor_rank(self) -> int:
        """Return the number of this rank's part of each of its experts."""
        return int(parallel_state.get_expert_tensor_parallel_rank())

    @property
    def expert_tensor_group(self) -> Any:
        """The ranks that share this rank's experts."""
        return parallel_state.get_expert_tensor_parallel_group()

    @property
    def is_first_expert_copy(self) -> bool:
        """Return whether this is the first of the ranks that hold the same parts of the same experts."""
        return int(parallel_state.get_expert_data_parallel_rank()) == 0

    @property
    def is_first_copy(self) -> bool:
        """Return whether this is the first of the ranks that hold the same slices of other weights."""
        return self.data_parallel_rank == 0 and (self.context is None or self.context.rank == 0)

    @property
    def vocabulary(self) -> VocabularyRanks:
        """The tensor ranks, which share the embedding and the head; Megatron pads the last rank's rows."""
        group = self.tensor_group if self.sizes.tensor > 1 else None
        return VocabularyRanks(group, self.tensor_rank, self.sizes.tensor)

    @property
    def tensor_group(self) -> Any:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def stage_group(self) -> Any:
        """The ranks that have the other layers of this rank's micro-batches."""
        return parallel_state.get_pipeline_model_parallel_group()


class _Opened:
    """megatron-core's groups in this process: their sizes, and the engines that were made on them."""

    sizes: Sizes | None = None
    users: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()


def open_mesh(parallel: MegatronParallel, device: str, key: str, user: Any) -> MegatronRanks:
    """Open the mesh over all ranks of this run, or over this process alone, until `user` ends.

    `key` is that of `parallel`. Raises ValueError naming the dimension if the sizes do not fit the number of ranks, or
    an engine of this process that has not ended uses other sizes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = parallel.sizes(world)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1)
    if _Opened.sizes not in (None, sizes):
        _close(_Opened.sizes, sizes, device, key)
    if _Opened.sizes is None:
        _initialise(sizes, device)
        _Opened.sizes = sizes
    _Opened.users.add(user)
    context = None
    if sizes.context > 1:
        group = parallel_state.get_context_parallel_group()
        context = SequenceRanks(group, parallel_state.get_context_parallel_rank(), sizes.context)
    tokens = context
    if sizes.sequence:
        group = parallel_state.get_tensor_and_context_parallel_group()
        tokens = SequenceRanks(group, dist.get_rank(group), sizes.context * sizes.tensor)
    return MegatronRanks(sizes, dist.get_rank(), context, tokens)


def _initialise(sizes: Sizes, device: str) -> None:
    deadline = deadline_of_groups(device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        distributed_timeout_minutes=max(1, math.ceil(deadline.total_seconds() / 60)),
        create_gloo_process_groups=False,
    )
    give_deadline(deadline)


def _close(opened: Sizes, wanted: Sizes, device: str, key: str) -> None:
    """Destroy the groups, so that others can be opened. Every rank calls this, and all raise ValueError if one must."""
    gc.collect()  # an engine is in cycles
    in_use = torch.tensor(len(_Opened.users), device=device)
    dist.all_reduce(in_use, op=dist.ReduceOp.MAX)
    if in_use:
        old, new = (
            ", ".join(f"{KEYS.get(name, name)}={getattr(one, name)}" for name in _differing(opened, wanted))
            for one in (opened, wanted)
        )
        raise ValueError(
            f"{key}: this process has a megatron engine with {old}, and this one asks for {new}; megatron-core has one "
            "set of groups for a process. Give both the same sizes, place the roles in processes of their own, or drop "
            "all references to the engine of an earlier run"
        )
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)
    _Opened.sizes = None


def _differing(one: Sizes, other: Sizes) -> list[str]:
    return [field.name for field in fields(Sizes) if getattr(one, field.name) != getattr(other, field.name)]
