"""Sharding by NeMo Automodel: transformers' tensor plan in its styles, then its FSDP2, over the ranks of hone's mesh.

The embedding and the head stay whole over tensor ranks, as in `fsdp2`: hone computes scores from the head's weight.
"""

from __future__ import annotations

import functools
from typing import Any

from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
from nemo_automodel.components.distributed.parallel_styles import ReplicatedWithGradAllReduce
from nemo_automodel.components.distributed.parallelizer import ModelParallelizer, translate_to_torch_parallel_style
from torch.distributed.device_mesh import DeviceMesh

from hone.engines.base import deadline_of_groups, give_deadline
from hone.engines.fsdp2.settings import Sizes
from hone.engines.fsdp2.sharding import (
    Sharder,
    ShardingError,
    require_heads,
    require_shards,
    require_shared_heads,
    sum_all_gradients,
    wildcard,
)
from hone.models.numerics.precision import wide_weights


class _Parallelizer(ModelParallelizer):  # type: ignore[misc]  # the package has no types
    """Automodel's parallelisation, with the head in the outermost FSDP unit, whose weights hone's scores read."""

    def _fully_shard_untied_input_output_embeddings(self, model: Any, **options: Any) -> None: ...

    def _fully_shard_module(self, module: Any, *, reshard_after_forward: bool, **options: Any) -> Any:
        """Let FSDP decide for units that Automodel keeps gathered: the last layer, and the outermost unit.

        They would keep the weights of a value model's body, which is not outermost.
        """
        return super()._fully_shard_module(module, reshard_after_forward=reshard_after_forward or None, **options)


class AutomodelSharder(Sharder):
    """Shards one engine's model; a value head is sharded as `fsdp2` does it."""

    def shard(self, model: Any, name: str) -> None:
        model.tie_weights()
        sizes = self._mesh.sizes
        if sizes.sequence > 1:
            require_shared_heads(model, sizes, self._key("sequence"), name)
        require_shards(sizes, self._key("replicate"))
        precision, wide = self._precision(), wide_weights(model)
        if precision.param_dtype is not None and any(wide(key) for key, _ in model.named_parameters()):
            raise ShardingError(
                f"{name} keeps some weights in float32, and Automodel would compute them in {self._compute}; use "
                "backend fsdp2, or compute_dtype: float32"
            )
        policy = FSDP2Config(
            mp_policy=precision,
            tp_plan=self._plan(model, name) if sizes.tensor > 1 else None,
        )
        context = MeshContext.from_meshes(_open(sizes, self._mesh.dense.device_type), strategy_config=policy)
        _Parallelizer().parallelize(model, context)
        sum_all_gradients(model)

    def _plan(self, model: Any, name: str) -> dict[str, Any]:
        """The styles of matrices in layers; notes the norms of single heads, whose gradients are partial sums."""
        key, size = self._key("tensor"), self._mesh.sizes.tensor
        require_heads(model, size, key, name)
        styles = {path: style for path, style in model.tp_plan.items() if ".layers." in f".{path}"}
        if not styles:
            raise ShardingError(f"{key} = {size}: {name} has no tensor-parallel plan in transformers; leave it at 1")
        try:
            plan = {path: translate_to_torch_parallel_style(style) for path, style in styles.items()}
        except ValueError as error:
            raise ShardingError(f"{key} = {size}: Automodel cannot cut {name}: {error}; leave it at 1") from error
        partial = {path for path, style in plan.items() if isinstance(style, ReplicatedWithGradAllReduce)}
        self._norms.names = [n for n, _ in model.named_parameters() if wildcard(n).rpartition(".")[0] in partial]
        return plan


@functools.cache
def _open(sizes: Sizes, device: str) -> DeviceMesh:
    """Automodel's mesh over the same ranks. To Automodel, ranks that share tokens are ranks that share weights.

    hone's packed attention exchanges the tokens.
    """
    ranks = ParallelismSizes(
        dp_size=sizes.world // sizes.tensor, dp_replicate_size=sizes.replicate, tp_size=sizes.tensor
    )
    mesh: DeviceMesh = MeshContext.build(FSDP2Config(), ranks, world_size=sizes.world).device_mesh
    give_deadline(deadline_of_groups(device))
    return mesh
