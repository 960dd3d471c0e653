"""Lays a Hugging Face model over a mesh: transformers' own tensor and expert plans, then `fully_shard` around them.

    layers' matrices --tensor plan--> slices over `tensor`        experts --expert plan--> whole experts over `expert`
    everything --fully_shard, layer by layer--> shards over `fsdp`, gathered for use, gradients summed back into shards

Gradients are sums over ranks, never means: the loss weights carry the denominator of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import apply_expert_parallelism, apply_tensor_parallelism
from transformers.modeling_layers import GradientCheckpointingLayer

from hone.engines.forward import Forward
from hone.engines.mesh import EXPERT, TENSOR, Mesh
from hone.engines.precision import kept_wide
from hone.engines.settings import Sizes
from hone.engines.shards import Shard, TensorSplit, gather
from hone.models.errors import ModelError
from hone.models.four_bit import seen_as_plain, still_empty
from hone.models.sequence_parallel import shared_by
from hone.types import Batch, ModelOutput

if TYPE_CHECKING:
    from hone.engines.lora import Adapter

R = TypeVar("R")

_PARTIAL = "replicated_with_grad_allreduce"  # transformers' word for norms inside a layer whose heads are split
_DISPATCH = "ep_dispatch_experts"


class ShardingError(ModelError):
    """A model that cannot be laid over the mesh; the message names the dimension (parallel.tensor ...)."""


class Sharder:
    """Shards one engine's model: on which mesh, and computed in which precision."""

    def __init__(self, mesh: Mesh, stored: torch.dtype, compute: torch.dtype, adapter: Adapter | None = None) -> None:
        """`stored` is the precision in which the optimizer updates the weights; an `adapter` is put around them."""
        self._mesh = mesh
        self._stored = stored
        self._compute = compute
        self._adapter = adapter
        self._styles: dict[str, str] = {}  # how `tensor` has cut each kind of module
        self.partial: list[str] = []  # weights whose gradients are to be summed over `tensor` (norms of single heads)

    def shard(self, model: Any, name: str) -> None:
        """Turn a transformers model, empty (meta) or filled, into its shards, in place; `name` is for errors.

        Raises ShardingError naming the dimension of the mesh that does not fit the model.
        """
        model.tie_weights()
        sizes = self._mesh.sizes
        if sizes.sequence > 1:
            _require_shared_heads(model, sizes, name)
        if sizes.tensor > 1:
            self._split_matrices(model, name)
        if sizes.expert > 1:
            self._split_experts(model, name)
        if self._adapter is not None:
            split = TensorSplit(self._styles, self._mesh.dense[TENSOR]) if sizes.tensor > 1 else None
            with seen_as_plain(model):
                self._adapter.attach(model, name, split, experts_cut=sizes.expert > 1)
        self._shard_parameters(model)
        if self._adapter is not None:
            self._adapter.hide(model)

    def wrap(self, model: nn.Module) -> None:
        """Shard what a wrapper has beside the model within it, and let `inside` run in its forward."""
        if not isinstance(model, FSDPModule):
            self._fully_shard(model, self._mesh.fsdp, self._policy(), last=True)
        for part in (model, getattr(model, "body", None)):  # the body of a value model is sharded by itself
            if isinstance(part, FSDPModule):
                part._hone_inside = _call  # type: ignore[attr-defined]
                register_fsdp_forward_method(part, "_hone_inside")

    # ---------------------------------------------------------------------------------------------------- tensor

    def _split_matrices(self, model: Any, name: str) -> None:
        size = self._mesh.sizes.tensor
        plan = {key: style for key, style in model.tp_plan.items() if ".layers." in f".{key}"}
        if not plan:
            raise ShardingError(
                f"parallel.tensor = {size}: {name} has no tensor-parallel plan in transformers; leave it at 1 and use "
                "parallel.shard or parallel.sequence"
            )
        _require_heads(model, size, "tensor", name)
        partial = [key for key, style in plan.items() if style == _PARTIAL]
        partial += _norms_of_split_heads(model, plan)
        plan = {key: style for key, style in plan.items() if style != _PARTIAL}
        if self._mesh.sizes.expert > 1:
            experts = tuple(model.ep_plan)
            plan = {key: style for key, style in plan.items() if not key.startswith(experts)}
        self._styles = plan
        try:
            apply_tensor_parallelism(model, self._mesh.dense[TENSOR], plan)
        except (ValueError, RuntimeError) as error:
            raise ShardingError(f"parallel.tensor = {size} does not fit {name}: {error}") from error
        self.partial = [n for n, _ in model.named_parameters() if _wildcard(n).rpartition(".")[0] in partial]

    # --------------------------------------------------------------------------------------------------- experts

    def _split_experts(self, model: Any, name: str) -> None:
        size, plan = self._mesh.sizes.expert, dict(model.ep_plan)
        if _DISPATCH not in plan.values():
            raise ShardingError(
                f"parallel.expert = {size}: {name} has no expert-parallel plan in transformers; leave it at 1"
            )
        count = next((getattr(m, "num_experts", 0) for m in model.modules() if getattr(m, "num_experts", 0)), 0)
        if count % size:
            raise ShardingError(f"parallel.expert = {size} does not divide the {count} experts of {name}")
        apply_expert_parallelism(model, self._mesh.experts[EXPERT], self._mesh.dense[TENSOR], plan)
        if self._mesh.sizes.tensor > 1:
            for module in _experts(model):
                module.forward = _cloned(module.forward)

    # ------------------------------------------------------------------------------------------------------ fsdp

    def _shard_parameters(self, model: Any) -> None:
        policy = self._policy()
        if self._mesh.sizes.expert > 1:
            for module in _experts(model):
                self._fully_shard(module, self._mesh.expert_fsdp, policy)
        keep = kept_wide(model)
        for path, module in list(model.named_modules()):
            weights = [f"{path}.{key}" for key, _ in module.named_parameters(recurse=False)]
            if weights and policy.param_dtype is not None and all(keep(weight) for weight in weights):
                self._fully_shard(module, self._mesh.fsdp, self._policy(wide=True))
        for layer in _layers(model):
            self._fully_shard(layer, self._mesh.fsdp, policy)
        self._fully_shard(model, self._mesh.fsdp, policy, last=True)

    def _policy(self, wide: bool = False) -> MixedPrecisionPolicy:
        """Gathered in compute precision (`wide`: as stored), summed in float32 at least, updated as stored."""
        narrow = self._compute == torch.bfloat16
        return MixedPrecisionPolicy(
            param_dtype=None if wide or self._stored == self._compute else self._compute,
            reduce_dtype=torch.float32 if narrow else None,
            cast_forward_inputs=False,
        )

    def _fully_shard(self, module: nn.Module, mesh: Any, policy: MixedPrecisionPolicy, last: bool = False) -> None:
        reshard = None if last else True
        fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=still_empty(module)
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def inside(model: Any, run: Callable[[], R]) -> R:
    """Call `run` as if it were the forward of a sharded model: weights outside of its layers are whole meanwhile.

    What `run` returns has to be made of tuples, lists, dicts and tensors, or backward will not find it.
    """
    return model._hone_inside(run)  # type: ignore[no-any-return]


def sharded_forward(model: nn.Module, forward: Forward, mesh: Mesh) -> Forward:
    """`forward` run inside of a sharded model."""

    def run(batch: Batch, needs: frozenset[str]) -> ModelOutput:
        def plain() -> dict[str, Any]:
            with shared_by(mesh.sequence):
                output = forward(batch, needs)
            return {
                "logprobs": output.logprobs,
                "entropy": output.entropy,
                "values": output.values,
                "extras": dict(output.extras),
            }

        return ModelOutput(**inside(model, plain))

    return run


BUCKET_BYTES = 128 * 2**20


def whole_weights(model: nn.Module, weights: Any) -> Iterator[tuple[str, Tensor]]:
    """Every entry of a sharded model's state dict, whole, gathered bucket by bucket; tied weights under each name."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    aliases = {same[0]: same for same in names.values()}
    for name, tensor in gather(weights.parts(), BUCKET_BYTES):
        yield name, tensor
        for alias in aliases[name][1:]:
            yield alias, tensor.clone()
    for name, tensor in model.state_dict().items():
        if name not in aliases and not any(name in same for same in aliases.values()):
            yield name, tensor.clone()


def whole_weight(name: str, weight: Tensor, mesh: Mesh) -> Tensor:
    """One weight of a sharded model, whole. Every rank has to ask."""
    held = weight.detach()
    local: Tensor = held.to_local() if isinstance(held, DTensor) else held
    return next(gather([(name, local, Shard.of(held, mesh))], BUCKET_BYTES))[1]


def later(begin: Callable[[], Iterator[R]]) -> Iterator[R]:
    """What `begin` gives, begun when the first is asked for."""
    yield from begin()


def nothing(ranks: int) -> Batch:
    """A batch for a rank that has none: one sequence with a token for each of the ranks that share it."""
    length = max(2, ranks)
    mask = torch.ones(length, dtype=torch.bool)
    mask[0] = False
    return Batch(
        token_ids=torch.zeros(length, dtype=torch.int64),
        position_ids=torch.arange(length),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, length]),
        group_index=torch.zeros(1, dtype=torch.int64),
        episode_index=torch.zeros(1, dtype=torch.int64),
    )


def _call(run: Callable[[], R]) -> R:
    return run()


def _cloned(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With tensor parallelism, experts return a view, on which the hooks of `fully_shard` would be lost."""

    def run(*arguments: Any) -> Tensor:
        return forward(*arguments).clone()

    return run


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def _experts(model: Any) -> Iterator[nn.Module]:
    keys = [key for key, style in model.ep_plan.items() if style == _DISPATCH]
    return (module for path, module in model.named_modules() if _wildcard(path) in keys)


def _norms_of_split_heads(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Norms of single heads beside split queries and keys that the plan does not name (GLM-4-MoE's): each rank has the
    gradient of its own heads only.

    Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/glm4_moe/configuration_glm4_moe.py
    """
    split = [key.removesuffix("_proj") for key, style in plan.items() if style == "colwise" and key.endswith("_proj")]
    norms = {f"{key}_norm" for key in split} - plan.keys()
    return sorted(norms & {_wildcard(path) for path, _ in model.named_modules()})


def _wildcard(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp, as plans are written."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _require_shared_heads(model: Any, sizes: Sizes, name: str) -> None:
    """Each sequence rank has some query heads in attention; where there are fewer key and value heads, they repeat."""
    config = model.config.get_text_config()
    queries = config.num_attention_heads // sizes.tensor
    pairs = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // sizes.tensor
    for count, key in ((queries, "num_attention_heads"), (pairs, "num_key_value_heads")):
        if count == 0 or (count % sizes.sequence and (key == "num_attention_heads" or sizes.sequence % count)):
            of = f"{count} {key} of {name}" + (f" on each of {sizes.tensor} tensor ranks" if sizes.tensor > 1 else "")
            raise ShardingError(f"parallel.sequence: {of} cannot be shared out over {sizes.sequence} ranks")


def _require_heads(model: Any, size: int, dimension: str, name: str) -> None:
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % size:
            raise ShardingError(f"parallel.{dimension}: {heads} {key} of {name} cannot be shared out over {size} ranks")
