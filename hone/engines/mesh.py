"""The ranks that train one model, and who of them shares what.

    rank = ((replica * shard + s) * sequence + q) * tensor + t                    (tensor varies fastest)

    replica, s    data parallel: batches of their own; s also holds its share of the weights
    q             sequence parallel: a slice of the tokens of each micro-batch, and a share of the weights too
    t             tensor parallel: the same tokens, a slice of each layer's matrices

Weights are sharded over `fsdp` = shard x sequence. Experts lie over the same ranks in another grid (replica,
expert_fsdp, expert): a rank keeps its experts whole and tokens travel to them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hone.engines.settings import ParallelConfig, Sizes
from hone.models.sequence_parallel import SequenceRanks

REPLICATE, FSDP, TENSOR = "replicate", "fsdp", "tensor"
EXPERT_FSDP, EXPERT = "expert_fsdp", "expert"


@dataclass(frozen=True, slots=True)
class Mesh:
    """One model's mesh of at least two ranks, as this rank sees it."""

    sizes: Sizes
    rank: int
    dense: DeviceMesh  # (replicate, fsdp, tensor)
    experts: DeviceMesh  # (replicate, expert_fsdp, expert)
    sequence: SequenceRanks | None  # who shares this rank's micro-batches; None: nobody

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // (self.sizes.sequence * self.sizes.tensor)

    @property
    def data_parallel_size(self) -> int:
        return self.sizes.replicate * self.sizes.shard

    @property
    def is_output_rank(self) -> bool:
        """Whether this is the first of the ranks that compute the same results."""
        return self.rank % (self.sizes.sequence * self.sizes.tensor) == 0

    @property
    def fsdp(self) -> DeviceMesh:
        """What `fully_shard` is given for weights that every rank has: 1-D, or 2-D with replicas."""
        return self.dense[REPLICATE, FSDP] if self.sizes.replicate > 1 else self.dense[FSDP]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """What `fully_shard` is given for experts."""
        return self.experts[REPLICATE, EXPERT_FSDP] if self.sizes.replicate > 1 else self.experts[EXPERT_FSDP]

    def root_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The whole grid that a weight's mesh is a part of."""
        names = mesh.mesh_dim_names or ()
        return self.experts if EXPERT in names or EXPERT_FSDP in names else self.dense

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(value)
        return value

    def meet(self) -> None:
        """Until every rank is here; the process group's timeout is the deadline."""
        dist.barrier()

    def most(self, count: int, device: str) -> int:
        """The largest of all ranks' numbers."""
        value = torch.tensor(count, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)


def open_mesh(parallel: ParallelConfig, device: str) -> Mesh | None:
    """The mesh over all ranks of this run; None for one process, which has none.

    Raises ValueError naming the dimension if the sizes do not fit the number of ranks.
    """
    distributed = dist.is_available() and dist.is_initialized()
    sizes = parallel.sizes(dist.get_world_size() if distributed else 1)
    return _open(sizes, device) if sizes.world > 1 else None


@functools.cache
def _open(sizes: Sizes, device: str) -> Mesh:
    """Process groups are made once for each shape: all models of a run with that shape share them."""
    one_copy = sizes.shard * sizes.sequence * sizes.tensor
    dense = init_device_mesh(
        device,
        (sizes.replicate, sizes.shard * sizes.sequence, sizes.tensor),
        mesh_dim_names=(REPLICATE, FSDP, TENSOR),
    )
    experts = dense
    if sizes.expert > 1:
        experts = init_device_mesh(
            device,
            (sizes.replicate, one_copy // sizes.expert, sizes.expert),
            mesh_dim_names=(REPLICATE, EXPERT_FSDP, EXPERT),
        )
    sequence = None
    if sizes.sequence > 1:
        grid = init_device_mesh(
            device,
            (sizes.replicate * sizes.shard, sizes.sequence, sizes.tensor),
            mesh_dim_names=("data", "sequence", "tensor"),
        )
        own = grid["sequence"]
        sequence = SequenceRanks(own.get_group(), own.get_local_rank(), sizes.sequence)
    _give_deadline(device)
    return Mesh(sizes, dist.get_rank(), dense, experts, sequence)


def _give_deadline(device: str) -> None:
    """The run's deadline for the groups of the mesh too: torch gives each new group its own default of 30 minutes."""
    internals: Any = dist.distributed_c10d
    deadline = internals._get_default_group()._get_backend(torch.device(device)).options._timeout
    for group in internals._world.pg_map:
        internals._set_pg_timeout(deadline, group)
