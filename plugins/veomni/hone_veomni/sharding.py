"""Sharding by VeOmni: its FSDP2 around each layer and the whole model, over the ranks of hone's mesh."""

from __future__ import annotations

from typing import Any

import torch
from veomni.arguments import MixedPrecisionConfig
from veomni.distributed.parallel_state import ParallelState, init_parallel_state, use_parallel_state
from veomni.distributed.torch_parallelize import build_parallelize_model

from hone.engines.base import deadline_of_groups, give_deadline
from hone.engines.fsdp2.mesh import Mesh
from hone.engines.fsdp2.settings import ShardConfig
from hone.engines.fsdp2.sharding import Sharder, require_shards, require_shared_heads, sum_all_gradients
from hone.engines.fsdp2.shards import fill


class VeomniSharder(Sharder):
    """Shards one engine's model; a value head is sharded as `fsdp2` does it."""

    def __init__(self, mesh: Mesh, parallel: ShardConfig, stored: torch.dtype, compute: torch.dtype) -> None:
        super().__init__(mesh, parallel, stored, compute)
        self._state = _open(mesh, mesh.dense.device_type)

    def shard(self, model: Any, name: str) -> None:
        model.tie_weights()
        require_shards(self._mesh.sizes, self._key("replicate"))
        if self._mesh.sizes.sequence > 1:
            require_shared_heads(model, self._mesh.sizes, self._key("sequence"), name)
        whole = dict(model.named_parameters())
        with use_parallel_state(self._state):
            build_parallelize_model(
                model,
                init_device="meta",
                should_skip_hf_weight_load=True,  # hone reads the weights, so that errors and value heads are the same
                enable_gradient_checkpointing=False,  # hone recomputes layers itself
                mixed_precision=self._mixed_precision(),
            )
        sum_all_gradients(model)
        if any(weight.is_meta for weight in whole.values()):
            model.to("meta")  # VeOmni has given the shards memory, with nothing in it; transformers fills meta tensors
            return
        for key, weight in model.named_parameters():
            fill(weight, whole[key], self._mesh)

    def _mixed_precision(self) -> MixedPrecisionConfig:
        policy = self._precision()
        if policy.param_dtype is None:
            return MixedPrecisionConfig(enable=False)
        return MixedPrecisionConfig(param_dtype=_name(policy.param_dtype), cast_forward_inputs=False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open(mesh: Mesh, device: str) -> ParallelState:
    """VeOmni's mesh over the same ranks. To VeOmni, ranks that share tokens are ranks that share weights.

    hone's packed attention exchanges the tokens, and VeOmni's own sequence parallelism needs flash attention.
    """
    sizes = mesh.sizes
    holders = sizes.shard * sizes.sequence
    state: ParallelState = init_parallel_state(
        dp_size=sizes.world,
        dp_replicate_size=sizes.replicate,
        dp_shard_size=holders,
        device_type=device,
        name=None,
    )
    give_deadline(deadline_of_groups(device))
    return state
