"""torchtitan's device meshes: which ranks share weights, batches and matrices.

    rank = (replica * shard + s) * tensor + t                                     (tensor varies fastest)

A run of one process has meshes too, of one rank: torchtitan's mixed precision is that of its FSDP.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.distributed as dist
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from hone.engines.base import JobRanks, deadline_of_groups, give_deadline
from hone.engines.vocabulary import VocabularyRanks
from hone_torchtitan.settings import Sizes, TitanParallel

SPMD_BACKEND = "partial_dtensor"
"""Of torchtitan's three ways to write parallel tensors, the one whose gradients are right on torch 2.13."""


@dataclass(frozen=True, slots=True)
class TitanRanks(JobRanks):
    """This rank's view of the meshes; implements `hone.engines.base.Ranks`."""

    sizes: Sizes
    rank: int
    parallelism: ParallelismConfig
    dims: ParallelDims

    @property
    def world(self) -> int:
        return self.sizes.world

    @property
    def token_ranks(self) -> int:
        """Return the number of ranks that share tokens between matrices; torchtitan cuts rows and joins them."""
        return self.sizes.tensor if self.sizes.sequence else 1

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self.sizes.tensor

    @property
    def data_parallel_size(self) -> int:
        return self.sizes.replicate * self.sizes.shard

    @property
    def is_output_rank(self) -> bool:
        """Return whether this is the first of the ranks that compute the same results."""
        return self.rank % self.sizes.tensor == 0

    @property
    def vocabulary(self) -> VocabularyRanks:
        """The tensor ranks, which share the embedding and the head."""
        mesh = self.dims.get_optional_mesh("tp")
        group = None if mesh is None else mesh.get_group()
        return VocabularyRanks(group, self.rank % self.sizes.tensor, self.sizes.tensor)


def open_mesh(parallel: TitanParallel, device: str) -> TitanRanks:
    """Open the meshes over all ranks of this run, or over this process alone.

    Raises ValueError naming the dimension if the sizes do not fit the number of ranks.
    """
    sizes = parallel.sizes(dist.get_world_size() if dist.is_initialized() else 1)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1)
    return _open(sizes, device)


@functools.cache
def _open(sizes: Sizes, device: str) -> TitanRanks:
    """Open meshes once per shape: all models of a run with that shape share their process groups."""
    set_spmd_backend(SPMD_BACKEND)
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=sizes.replicate,
        data_parallel_shard_degree=sizes.shard,
        tensor_parallel_degree=sizes.tensor,
        enable_sequence_parallel=sizes.sequence,
        spmd_backend=SPMD_BACKEND,
    )
    dims = ParallelDims.from_config(parallelism, sizes.world)
    dims.build_mesh()
    give_deadline(deadline_of_groups(device))
    return TitanRanks(sizes, dist.get_rank(), parallelism, dims)
