"""Distribute a Hugging Face model over a mesh: transformers' own tensor and expert plans, then `fully_shard`.

    layers' matrices --tensor plan--> slices over `tensor`        experts --expert plan--> whole experts over `expert`
    everything --fully_shard, layer by layer--> shards over `fsdp`, gathered for use, gradients summed back into shards

Gradients are summed over ranks, not averaged: the loss weights contain the denominator of the whole step.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import __version__ as transformers_version
from transformers.distributed import tensor_parallel
from transformers.modeling_layers import GradientCheckpointingLayer

from hone.engines.forward import Forward
from hone.engines.fsdp2.mesh import EXPERT, FSDP, REPLICATE, TENSOR, Mesh
from hone.engines.fsdp2.settings import ShardConfig, Sizes
from hone.engines.fsdp2.weights import Partial
from hone.engines.lora.targets import WHOLE, Split
from hone.models.attention.indexed import indexers
from hone.models.attention.sequence_parallel import SequenceRanks, shared_by
from hone.models.attention.stateful import state_layers
from hone.models.errors import ModelError
from hone.models.four_bit import seen_as_plain, still_empty
from hone.models.numerics.precision import wide_weights
from hone.types import Batch, ModelOutput, Need

if TYPE_CHECKING:
    from hone.engines.lora.peft_layers import AdapterLayers

R = TypeVar("R")

_PARTIAL = "replicated_with_grad_allreduce"  # transformers' name for norms inside a layer whose heads are split
_DISPATCH = "ep_dispatch_experts"


class ShardingError(ModelError):
    """Error for a model that does not fit the mesh; the message names the key (actor.backend.parallel.tensor)."""


class Sharding(Protocol):
    """Sharding of an engine's model. `Sharder` is one; engines of other packages have their own."""

    partial: Sequence[Partial]

    def shard(self, model: Any, name: str) -> None:
        """Turn a transformers model, empty (meta) or filled, into its shards, in place; `name` is for errors."""

    def wrap(self, model: nn.Module) -> None:
        """Shard what a wrapper adds to a model (a value head), and let `inside` run in its forward."""


class Sharder:
    """Shards one engine's model over a mesh."""

    def __init__(
        self,
        mesh: Mesh,
        parallel: ShardConfig,
        stored: torch.dtype,
        compute: torch.dtype,
        layers: AdapterLayers | None = None,
    ) -> None:
        """`stored` is the precision of the optimizer's weights; `layers` adds an adapter's layers to the model."""
        self._mesh = mesh
        self._key = parallel.key_of
        self._stored = stored
        self._compute = compute
        self._layers = layers
        self._styles: dict[str, str] = {}  # how `tensor` cut each kind of module
        self._norms = Partial(group=mesh.dense.get_group(TENSOR))  # of single heads
        self._copied: set[nn.Parameter] = set()  # not sharded
        self._copies = [Partial(group=mesh.dense.get_group(one)) for one in (REPLICATE, FSDP)]
        self.partial: Sequence[Partial] = (self._norms, *self._copies)

    def shard(self, model: Any, name: str) -> None:
        """Turn a transformers model, empty (meta) or filled, into its shards, in place; `name` is for errors.

        Raises ShardingError naming the dimension of the mesh that does not fit the model.
        """
        model.tie_weights()
        sizes = self._mesh.sizes
        _require_plans(sizes, self._key)
        if sizes.sequence > 1:
            require_shared_heads(model, sizes, self._key("sequence"), name)
        if sizes.tensor > 1:
            self._split_matrices(model, name)
        if sizes.expert > 1:
            self._split_experts(model, name)
        if self._layers is not None:
            with seen_as_plain(model):
                self._layers.attach(model, name, self._split())
        self._shard_parameters(model)
        if self._layers is not None:
            self._layers.hide(model)

    def _split(self) -> Split | None:
        """The cut that an adapter's layers follow; None: matrices and experts are whole."""
        sizes = self._mesh.sizes
        if sizes.tensor == sizes.expert == 1:
            return None
        tensor = self._mesh.dense[TENSOR] if sizes.tensor > 1 else None
        return Split(self._styles, tensor, sizes.expert > 1, self._key("").removesuffix("."))

    def wrap(self, model: nn.Module) -> None:
        """Shard what a wrapper adds to a model (a value head), and let `inside` run in its forward."""
        if not isinstance(model, FSDPModule):
            self._fully_shard(model, mesh=self._mesh.fsdp, policy=self._precision(), reshard=None)
        let_inside(model)

    # ---------------------------------------------------------------------------------------------------- tensor

    def _split_matrices(self, model: Any, name: str) -> None:
        size = self._mesh.sizes.tensor
        plan = {key: style for key, style in model.tp_plan.items() if ".layers." in f".{key}"}
        if not plan:
            raise ShardingError(
                f"{self._key('tensor')} = {size}: {name} has no tensor-parallel plan in transformers; leave it at 1 "
                "and use shard or sequence"
            )
        require_heads(model, size, self._key("tensor"), name)
        _require_whole_states(model, plan, f"{self._key('tensor')} = {size}", name)
        partial = [key for key, style in plan.items() if style == _PARTIAL]
        partial += _norms_of_split_heads(model, plan)
        plan = {key: style for key, style in plan.items() if style != _PARTIAL}
        if self._mesh.sizes.expert > 1:
            experts = tuple(model.ep_plan)
            plan = {key: style for key, style in plan.items() if not key.startswith(experts)}
        self._styles = plan
        try:
            tensor_parallel.apply_tensor_parallelism(model, self._mesh.dense[TENSOR], plan)
        except (ValueError, RuntimeError) as error:
            raise ShardingError(f"{self._key('tensor')} = {size} does not fit {name}: {error}") from error
        for path, module in model.named_modules():
            if "add_" in inspect.unwrap(type(module).forward).__code__.co_names:
                for key, child in module.named_children():
                    if any(one.startswith(wildcard(f"{path}.{key}.")) for one in plan):
                        child.forward = _cloned(child.forward)
        self._norms.names = [n for n, _ in model.named_parameters() if wildcard(n).rpartition(".")[0] in partial]

    # --------------------------------------------------------------------------------------------------- experts

    def _split_experts(self, model: Any, name: str) -> None:
        size, plan = self._mesh.sizes.expert, dict(model.ep_plan)
        if _DISPATCH not in plan.values():
            raise ShardingError(
                f"{self._key('expert')} = {size}: {name} has no expert-parallel plan in transformers; leave it at 1"
            )
        count = next((getattr(m, "num_experts", 0) for m in model.modules() if getattr(m, "num_experts", 0)), 0)
        if count % size:
            raise ShardingError(f"{self._key('expert')} = {size} does not divide the {count} experts of {name}")
        tensor_parallel.apply_expert_parallelism(model, self._mesh.experts[EXPERT], self._mesh.dense[TENSOR], plan)
        if self._mesh.sizes.tensor > 1:
            for module in _experts(model):
                module.forward = _cloned(module.forward)

    # ------------------------------------------------------------------------------------------------------ fsdp

    def _shard_parameters(self, model: Any) -> None:
        policy = self._precision()
        if self._mesh.sizes.expert > 1:
            for module in _experts(model):
                self._fully_shard(module, mesh=self._mesh.expert_fsdp, policy=policy)
        narrow = torch.bfloat16 in (self._stored, self._compute)
        root = self._shard_wide(model, policy) if narrow else policy
        for layers in _layers(model):
            self._fully_shard(*layers, mesh=self._mesh.fsdp, policy=policy)
        if root is not policy:
            self._shard_parts(model, policy, but=model.get_output_embeddings())
        self._fully_shard(model, mesh=self._mesh.fsdp, policy=root, reshard=None)

    def _shard_wide(self, model: Any, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        """Shard the modules whose weights stay in float32; returns the policy of what is in no module of its own.

        The head is such a part: losses use its weight outside of its forward. A weight that stays in float32 beside
        others (a decay, a few numbers per head) is not sharded, because FSDP gathers a module in one dtype.
        """
        wide, root, head = wide_weights(model), policy, model.get_output_embeddings()
        called_for_each_run = {part for indexer in indexers(model) for part in indexer.modules()}
        for path, module in reversed(list(model.named_modules())):
            weights = [f"{path}.{key}" for key, _ in module.named_parameters(recurse=False)]
            kept = [weight for weight in weights if wide(weight)]
            if not kept:
                continue
            if len(kept) < len(weights):
                self._copied.update(module.get_parameter(weight.rpartition(".")[2]) for weight in kept)
                for copies in self._copies:
                    copies.names.extend(kept)
            elif module is head:
                root = self._precision(wide=True)
            else:
                self._shard_parts(module, policy)  # which it would take along
                often = module in called_for_each_run  # ranks have different numbers of runs
                self._fully_shard(module, mesh=self._mesh.fsdp, policy=self._precision(wide=True), reshard=not often)
        return root

    def _shard_parts(self, module: nn.Module, policy: MixedPrecisionPolicy, but: nn.Module | None = None) -> None:
        """Shard each part of a module that is not sharded yet: an adapter's layer as a whole, which PEFT expects."""
        for part in module.children():
            has_weights = next(part.parameters(), None) is not None
            if has_weights and part is not but and not isinstance(part, FSDPModule):
                self._fully_shard(part, mesh=self._mesh.fsdp, policy=policy)

    def _precision(self, wide: bool = False) -> MixedPrecisionPolicy:
        """Gather in compute precision (`wide`: as stored), sum gradients in float32 at least, update as stored."""
        narrow = self._compute == torch.bfloat16
        return MixedPrecisionPolicy(
            param_dtype=None if wide or self._stored == self._compute else self._compute,
            reduce_dtype=torch.float32 if narrow else None,
            cast_forward_inputs=False,
        )

    def _fully_shard(
        self, *modules: nn.Module, mesh: Any, policy: MixedPrecisionPolicy, reshard: bool | None = True
    ) -> None:
        """Gather these together; `reshard` after the forward, None: unless one is the outermost module."""
        ignored = self._copied.union(*(still_empty(one) for one in modules))
        fully_shard(list(modules), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ignored)
        sum_gradients(modules[0])


def sum_gradients(module: nn.Module) -> None:
    """Let `fully_shard` sum a module's gradients over ranks instead of averaging them."""
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def reshard_all(model: nn.Module) -> None:
    """Give back the gathered weights of every module: after an inference, nothing else does."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sum_all_gradients(model: nn.Module) -> None:
    """Let `fully_shard` sum the gradients of a model that another package has sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sum_gradients(cast(nn.Module, module))


def let_inside(model: nn.Module) -> None:
    """Let `inside` run functions in the forward of a model that is sharded."""
    for part in (model, getattr(model, "body", None)):  # the body of a value model is sharded by itself
        if isinstance(part, FSDPModule):
            sharded: Any = part
            sharded._hone_inside = _call
            register_fsdp_forward_method(sharded, "_hone_inside")


def inside(model: Any, run: Callable[[], R]) -> R:
    """Call `run` as the forward of a sharded model, so that weights outside of its layers are gathered.

    `run` must return tuples, lists, dicts and tensors only: the backward hooks find no tensors in other objects.
    """
    return model._hone_inside(run)  # type: ignore[no-any-return]


def sharded_forward(model: nn.Module, forward: Forward, sequence: SequenceRanks | None = None) -> Forward:
    """Wrap `forward` to run `inside` a sharded model; the ranks of `sequence` share each micro-batch."""

    def run(batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        def plain() -> dict[str, Any]:
            with shared_by(sequence):
                output = forward(batch, needs)
            return {
                "logprobs": output.logprobs,
                "entropy": output.entropy,
                "values": output.values,
                "extras": dict(output.extras),
            }

        return ModelOutput(**inside(model, plain))

    return run


def _call(run: Callable[[], R]) -> R:
    return run()


def _cloned(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Clone a result, which is a view under tensor parallelism.

    A view of experts loses the hooks of `fully_shard`, and none can be changed in place (Llama 4's shared expert).
    """

    def run(*arguments: Any) -> Tensor:
        return forward(*arguments).clone()

    return run


def _layers(model: nn.Module) -> list[list[nn.Module]]:
    """The layers; one inside of another comes before it, and those that share weights are together (Zamba's)."""
    names = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    found: dict[frozenset[int] | nn.Module, list[nn.Module]] = {}
    for layer in reversed(list(model.modules())):
        if isinstance(layer, GradientCheckpointingLayer):
            shared = frozenset(id(one) for one in layer.parameters() if names[id(one)] > 1)
            found.setdefault(shared or layer, []).append(layer)
    return sorted(found.values(), key=len)  # what several share may have unshared layers inside


def _experts(model: Any) -> Iterator[nn.Module]:
    keys = [key for key, style in model.ep_plan.items() if style == _DISPATCH]
    return (module for path, module in model.named_modules() if wildcard(path) in keys)


def _norms_of_split_heads(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Norms of single heads that the plan leaves out although it splits queries and keys (GLM-4-MoE).

    Each rank has only its heads' part of their gradient.

    Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/glm4_moe/configuration_glm4_moe.py
    """
    split = [key.removesuffix("_proj") for key, style in plan.items() if style == "colwise" and key.endswith("_proj")]
    norms = {f"{key}_norm" for key in split} - plan.keys()
    return sorted(norms & {wildcard(path) for path, _ in model.named_modules()})


def _require_whole_states(model: nn.Module, plan: Mapping[str, str], setting: str, name: str) -> None:
    """Raise ShardingError if a rank would have a part of a layer with a state.

    Such a layer is computed whole on every rank of a tensor group: its convolution, decays and state know no ranks.
    """
    for path, layer in state_layers(model).items():
        for part, _ in layer.named_modules(prefix=path):
            style = plan.get(wildcard(part), WHOLE[0])
            if style not in WHOLE:
                raise ShardingError(
                    f"{setting}: transformers' plan for {name} cuts {part} ({style}), a part of a layer that carries a "
                    f"state ({type(layer).__name__}), which hone computes whole on every rank; leave it at 1 and use "
                    "shard"
                )


def wildcard(name: str) -> str:
    """Write a path as plans do: model.layers.3.mlp -> model.layers.*.mlp."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _require_plans(sizes: Sizes, key: Callable[[str], str]) -> None:
    """Raise ShardingError if the installed transformers cannot apply a plan of hone's choice (it can from 5.19 on)."""
    for name, size in (("tensor", sizes.tensor), ("expert", sizes.expert)):
        if size > 1 and not hasattr(tensor_parallel, "apply_expert_parallelism"):
            raise ShardingError(
                f"{key(name)} = {size} needs transformers 5.19, found {transformers_version}; leave it at 1, or "
                "install that version"
            )


def require_shared_heads(model: Any, sizes: Sizes, setting: str, name: str) -> None:
    """Raise ShardingError unless sequence ranks can share the heads; fewer key and value heads are repeated."""
    if indexers(model):
        why = f"the sparse attention of {name} needs whole sequences; leave it at 1 and use shard"
        raise ShardingError(f"{setting} = {sizes.sequence}: {why}")
    config = model.config.get_text_config()
    queries = config.num_attention_heads // sizes.tensor
    pairs = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // sizes.tensor
    for count, key in ((queries, "num_attention_heads"), (pairs, "num_key_value_heads")):
        if count == 0 or (count % sizes.sequence and (key == "num_attention_heads" or sizes.sequence % count)):
            of = f"{count} {key} of {name}" + (f" on each of {sizes.tensor} tensor ranks" if sizes.tensor > 1 else "")
            raise ShardingError(f"{setting}: {of} cannot be shared out over {sizes.sequence} ranks")


def require_shards(sizes: Sizes, setting: str) -> None:
    """Raise ShardingError for copies of a model that are not sharded, which other packages do not make."""
    if sizes.replicate > 1 and sizes.shard * sizes.sequence == 1:
        raise ShardingError(
            f"{setting} = {sizes.replicate} leaves no ranks to shard weights over, which this backend needs; make it "
            "smaller, or use backend fsdp2"
        )


def require_heads(model: Any, size: int, setting: str, name: str) -> None:
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % size:
            raise ShardingError(f"{setting}: {heads} {key} of {name} cannot be shared out over {size} ranks")
