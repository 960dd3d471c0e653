"""The device mesh: which ranks share batches, tokens, weights and experts.

    rank = ((replica * shard + s) * sequence + q) * tensor + t                    (tensor varies fastest)

    replica, s    data parallel: each rank has other batches; s also shards the weights
    q             sequence parallel: each rank has a slice of the tokens of a micro-batch; q also shards the weights
    t             tensor parallel: all ranks have the same tokens, each a slice of a layer's matrices

Weights are sharded over `fsdp` = shard x sequence. Experts use the same ranks in another grid (replica, expert_fsdp,
expert): a rank holds whole experts, and tokens are sent to them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hone.engines.base import JobRanks, deadline_of_groups, give_deadline
from hone.engines.fsdp2.settings import ShardConfig, Sizes
from hone.models.attention.sequence_parallel import SequenceRanks

REPLICATE, FSDP, TENSOR = "replicate", "fsdp", "tensor"
EXPERT_FSDP, EXPERT = "expert_fsdp", "expert"


@dataclass(frozen=True, slots=True)
class Mesh(JobRanks):
    """This rank's view of one model's mesh of at least two ranks; implements `hone.engines.base.Ranks`."""

    sizes: Sizes
    rank: int
    dense: DeviceMesh  # (replicate, fsdp, tensor)
    experts: DeviceMesh  # (replicate, expert_fsdp, expert)
    sequence: SequenceRanks | None  # the ranks that share this rank's micro-batches; None: no others

    @property
    def world(self) -> int:
        return self.sizes.world

    @property
    def token_ranks(self) -> int:
        return self.sizes.sequence

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // (self.sizes.sequence * self.sizes.tensor)

    @property
    def data_parallel_size(self) -> int:
        return self.sizes.replicate * self.sizes.shard

    @property
    def is_output_rank(self) -> bool:
        """Return whether this is the first of the ranks that compute the same results."""
        return self.rank % (self.sizes.sequence * self.sizes.tensor) == 0

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard` of weights other than experts: 1-D, or 2-D with replicas."""
        return self.dense[REPLICATE, FSDP] if self.sizes.replicate > 1 else self.dense[FSDP]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard` of experts."""
        return self.experts[REPLICATE, EXPERT_FSDP] if self.sizes.replicate > 1 else self.experts[EXPERT_FSDP]


def open_mesh(parallel: ShardConfig, device: str) -> Mesh | None:
    """Open the mesh over all ranks of this run; None for a run of one process.

    Raises ValueError naming the dimension if the sizes do not fit the number of ranks.
    """
    distributed = dist.is_available() and dist.is_initialized()
    sizes = parallel.sizes(dist.get_world_size() if distributed else 1)
    return _open(sizes, device) if sizes.world > 1 else None


@functools.cache
def _open(sizes: Sizes, device: str) -> Mesh:
    """Open a mesh once per shape: all models of a run with that shape share its process groups."""
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
    give_deadline(deadline_of_groups(device))
    return Mesh(sizes, dist.get_rank(), dense, experts, sequence)
