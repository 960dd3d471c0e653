"""The process groups of Megatron-Core: which ranks share matrices, tokens, stages, experts and batches.

    rank = ((stage * data + d) * context + c) * tensor + t                        (tensor varies fastest)

megatron-core keeps these groups in module variables, so all `megatron` engines of one process have the same sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from hone.engines.base import JobRanks, deadline_of_groups, give_deadline
from hone.engines.logprobs import WHOLE, Vocabulary
from hone.engines.megatron.settings import MegatronParallel, Sizes
from hone.engines.vocabulary import SharedVocabulary
from hone.models.attention.sequence_parallel import SequenceRanks


@dataclass(frozen=True, slots=True)
class MegatronRanks(JobRanks):
    """This rank's view of the mesh; implements `hone.engines.base.Ranks`."""

    sizes: Sizes
    rank: int
    context: SequenceRanks | None  # the ranks that share this rank's micro-batches; None: no others

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
        """Whether this is the first of the ranks that compute the same results, on the last stage."""
        is_last = self.stage == self.sizes.pipeline - 1
        return is_last and self.rank % (self.sizes.tensor * self.sizes.context) == 0

    @property
    def expert_rank(self) -> int:
        return int(parallel_state.get_expert_model_parallel_rank())

    @property
    def is_first_expert_copy(self) -> bool:
        """Whether this is the first of the ranks that hold the same experts."""
        return int(parallel_state.get_expert_data_parallel_rank()) == 0

    @property
    def is_first_copy(self) -> bool:
        """Whether this is the first of the ranks that hold the same slices of other weights."""
        return self.data_parallel_rank == 0 and (self.context is None or self.context.rank == 0)

    @property
    def tensor_group(self) -> Any:
        return parallel_state.get_tensor_model_parallel_group()

    def vocabulary(self, tokens: int) -> Vocabulary:
        """How the tensor ranks share a head of `tokens` rows."""
        if self.sizes.tensor == 1:
            return WHOLE
        return SharedVocabulary(self.tensor_group, self.tensor_rank, self.sizes.tensor, self.vocabulary_share(tokens))

    def rows_of_vocabulary(self, tokens: int) -> slice:
        """The tokens whose rows of a head this rank has."""
        share = self.vocabulary_share(tokens)
        return slice(share * self.tensor_rank, min(share * (self.tensor_rank + 1), tokens))

    def vocabulary_share(self, tokens: int) -> int:
        """Rows of the embedding and the head on each rank; the last rank's end with padding."""
        return -(-tokens // self.sizes.tensor)


_opened: dict[None, Sizes] = {}
"""The sizes of megatron-core's groups in this process, once they are open."""


def open_mesh(parallel: MegatronParallel, device: str) -> MegatronRanks:
    """Open the mesh over all ranks of this run, or over this process alone.

    Raises ValueError naming the dimension if the sizes do not fit the number of ranks, or another engine of this
    process has opened other sizes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = parallel.sizes(world)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1)
    if None not in _opened:
        _initialise(sizes, device)
        _opened[None] = sizes
    elif _opened[None] != sizes:
        raise ValueError(
            f"{parallel.key_of('')}: this process has a megatron engine over {_opened[None]}, and megatron-core keeps "
            f"its groups for the whole process; this one asks for {sizes}. Give both the same sizes, or place the "
            "roles in processes of their own"
        )
    context = None
    if sizes.context > 1:
        group = parallel_state.get_context_parallel_group()
        context = SequenceRanks(group, parallel_state.get_context_parallel_rank(), sizes.context)
    return MegatronRanks(sizes, dist.get_rank(), context)


def _initialise(sizes: Sizes, device: str) -> None:
    deadline = deadline_of_groups(device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, math.ceil(deadline.total_seconds() / 60)),
        create_gloo_process_groups=False,
    )
    give_deadline(deadline)
