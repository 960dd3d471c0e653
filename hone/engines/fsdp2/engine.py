"""The `fsdp2` engine: Hugging Face causal language models, or a value model on its body, in plain PyTorch.

In one process the model is loaded whole; on a mesh (see `mesh`) it is sharded while it is empty, and each rank reads
its parts. Either way a forward takes packed tokens, and a trial of the loaded model refuses architectures that break
the engine's assumptions (see `hone.engines.checks.probe`).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hone.engines.base import EngineSpec, MemoryNeeds, OneProcess
from hone.engines.checks.isolation import check_isolation, refuse_for_states
from hone.engines.checks.probe import check_body, check_head, check_images, check_training, try_body
from hone.engines.forward import Forward, language_forward, value_forward
from hone.engines.fsdp2.compiled import compile_layers
from hone.engines.fsdp2.mesh import Mesh, open_mesh
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig, ShardConfig, ShardedSettings
from hone.engines.fsdp2.sharding import Sharder, Sharding, inside, reshard_all, sharded_forward
from hone.engines.fsdp2.shards import local_part, place, whole_weight
from hone.engines.fsdp2.weights import ProcessWeights, ShardedWeights, cast_working
from hone.engines.logprobs import Head
from hone.engines.memory import OffloadingEngine, kept_in_cpu_memory, recompute_layers
from hone.engines.moe import open_experts
from hone.engines.reference_head import head_of_reference
from hone.models.errors import ModelError
from hone.models.loading import DTYPES, ClassOf, load_language_model, load_value_model
from hone.models.numerics.fused_norm import fuse_norms
from hone.models.transformers_patches import ShardFn
from hone.platforms.base import current_platform
from hone.types import Batch, ModelOutput, Need


class Fsdp2Engine(OffloadingEngine):
    """Loads the model, and moves its parts between the device and CPU memory."""

    weights: ProcessWeights | ShardedWeights

    def __init__(self, spec: EngineSpec, device: str) -> None:
        backend = spec.engine.backend
        assert isinstance(backend, ShardedSettings)
        self._parallel: ShardConfig = backend.parallel or ParallelConfig()
        self.mesh = open_mesh(self._parallel, device)
        self._compiler = backend.compile if isinstance(backend, Fsdp2Settings) else False
        if self._compiler and self.mesh is not None and self.mesh.sizes.tensor > 1:
            raise ValueError(
                f"{backend.key_of('compile')} does not work with {self._parallel.key_of('tensor')} = "
                f"{self.mesh.sizes.tensor}: torch cannot compile split matrices for rows of any length; remove one"
            )
        super().__init__(spec, device, self.mesh or OneProcess(), backend.offload)
        self._backend = backend

    # ------------------------------------------------------------------------------------------------------- building

    def _build(self) -> Forward:
        forward = self._build_whole() if self.mesh is None else self._build_sharded(self.mesh)
        checkpointing = self.spec.engine.activation_checkpointing
        if checkpointing and self.trained:
            recompute_layers(self._body)
        if self._compiler:
            self._compile("inductor" if self._compiler is True else self._compiler)
        return _offloading(forward) if checkpointing == "offload" else forward

    def _compile(self, backend: str) -> None:
        key, name = self._backend.key_of("compile"), self._name(self._body)
        if self.experts is not None:
            raise ModelError(
                f"{key}: {name} is a mixture of experts, whose sizes of matrices change with the routes of every "
                "micro-batch: each would be compiled anew; remove the key"
            )
        compile_layers(self._body, backend, key, name)

    def _build_whole(self) -> Forward:
        self.model = self._load(None)
        frozen: frozenset[str] = frozenset()
        if self.adapter is not None:
            adapted: Any = self.model.body if self.model_type == "value_model" else self.model
            self.adapter.layers.attach(adapted, self._name(adapted))
            self.adapter.fill(self.model, self._prefix, "cpu", _whole, _placed)
            frozen = self.adapter.names
        elif self.spec.follows:  # a blend in compute precision would lose small differences
            frozen = frozenset(name for name, _ in self.model.named_parameters())
        elif self.trained:  # an export has them as they were read (a tower)
            frozen = frozenset(name for name, weight in self.model.named_parameters() if not weight.requires_grad)
        if not self.trained and not frozen:
            cast_working(self.model, self.compute)  # there are no masters, so the device never holds the wider weights
        move_tied(self.model, self.device)  # before masters are made of it, or they would stay in host memory
        self.weights = ProcessWeights(self.model, self.compute, self.trained, frozen)
        if not self._compiler:  # which fuses them itself
            fuse_norms(self.model)
        return self._checked_forward()

    def _build_sharded(self, mesh: Mesh) -> Forward:
        sharder = self._sharder(mesh)
        self.model = self._load(lambda model: sharder.shard(model, self._name(model)))
        self.model.to(self.device)
        if self.adapter is not None:
            self.adapter.layers.show()
            gather = functools.partial(whole_weight, ranks=mesh)
            placing = functools.partial(place, device=self.device, ranks=mesh)
            self.adapter.fill(self.model, self._prefix, self.device, gather, placing)
        sharder.wrap(self.model)
        if not self._compiler:  # which fuses them itself
            fuse_norms(self.model)
        forward = inside(self.model, self._checked_forward)
        reshard_all(self.model)
        self.weights = ShardedWeights(self.model, mesh, self.trained, sharder.partial)
        return sharded_forward(self.model, forward, mesh.sequence)

    def _sharder(self, mesh: Mesh) -> Sharding:
        layers = None if self.adapter is None else self.adapter.layers
        return Sharder(mesh, self._parallel, DTYPES[self.spec.model.dtype], self.compute, layers)

    @property
    def _class_of(self) -> ClassOf | None:
        """The classes of models; None: transformers' own."""
        return None

    def _load(self, shard: ShardFn | None) -> nn.Module:
        spec = self.spec
        if self.adapter is None:
            load: Any = load_value_model if self.model_type == "value_model" else load_language_model
            model: nn.Module = load(spec.model, shard, class_of=self._class_of)
            return model
        frozen = spec.model.model_copy(update={"dtype": self.compute_dtype})  # nothing updates these weights
        four_bit = self.adapter.layers.four_bit
        if self.model_type == "value_model":
            return load_value_model(frozen, shard, DTYPES[spec.model.dtype], four_bit)
        return load_language_model(frozen, shard, four_bit)

    def _name(self, model: Any) -> str:
        return self.spec.model.path or f"architecture {model.config.model_type!r}"

    def _checked_forward(self) -> Forward:
        """The forward of the loaded model. Raises ModelError if the model does not behave as the engine assumes."""
        spec, name = self.spec, self._name(self._body)
        sizes, parallel = None if self.mesh is None else self.mesh.sizes, self._parallel
        refuse_for_states(
            self._body,
            name,
            {
                parallel.key_of("sequence"): sizes is not None and sizes.sequence > 1,
                self._backend.key_of("compile"): bool(self._compiler),
            },
        )
        self.model.eval()
        check_isolation(self._body, name, self.trained)
        hidden = check_body(self._body, name)
        check_images(self._body, name)
        if self.trained and not spec.model.used.dropout:
            with nullcontext() if self.adapter is None else self.adapter.disabled():
                check_training(self._body, name)
        moe = spec.engine.moe if self.trained else None  # a model that only infers keeps its own routes
        self.experts = open_experts(
            self._body, moe, name, lambda: try_body(self._body), bool(sizes and sizes.tensor > 1)
        )
        if self.model_type == "value_model":
            return value_forward(self.model, self.experts)  # type: ignore[arg-type]
        check_head(self.model, hidden, name)
        head = None
        if spec.reference is not None:
            head = head_of_reference(spec.reference, self.compute_dtype, self.device, self._head_dtype)
        if self.adapter is not None and spec.reference == spec.model:
            lora = spec.engine.lora
            policy: Any = self.model
            if lora is not None and lora.path and hasattr(policy.get_output_embeddings(), "active"):
                raise ValueError(
                    f"algorithm.kl.kind: full needs the head of the policy before training, and the one that "
                    f"{lora.key_of('path')}={lora.path} brings is trained on; choose another kind"
                )
            head = self._base_head
        chunk = spec.engine.logprob_chunk_tokens
        return language_forward(self.model, spec.temperature, chunk, head, self.experts, self._head_dtype)

    def _base_head(self) -> Head:
        """The head of the policy before training."""
        with self.disable_adapter():
            return replace(Head.of(self.model), dtype=self._head_dtype).converted()

    @property
    def _prefix(self) -> str:
        """Return the prefix of an adapted model's weights in this model's state dict."""
        return "body." if self.model_type == "value_model" else ""

    @property
    def _body(self) -> Any:
        return self.model.body if self.model_type == "value_model" else self.model.base_model

    # ------------------------------------------------------------------------------------------------------ placement

    def _infer(self, batch: Batch, cut: list[list[int]], needs: frozenset[Need]) -> list[ModelOutput]:
        outputs = super()._infer(batch, cut, needs)
        if self.mesh is not None:
            reshard_all(self.model)
        return outputs

    def memory_needs(self) -> MemoryNeeds:
        needs = super().memory_needs()
        if not self._backend.offload:
            return needs
        tensors = [local_part(one.detach()) for one in (*self.model.parameters(), *self.weights.masters.values())]
        weights = {one.untyped_storage().data_ptr(): one.nbytes for one in tensors}
        return MemoryNeeds(0, sum(weights.values()) + needs.kept + needs.training)

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts; the engine computes where its model is."""
        if model:
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = buffer.to(device) if buffer is not None else None
            self.device = device
        self.weights.move(device, model=model, optimizer=optimizer, grad=grad)
        if optimizer and self.trained:
            self.update.move(device)
        if device == "cpu" != self._home:
            current_platform().empty_cache()  # otherwise the allocator keeps the memory from other processes


def _offloading(forward: Forward) -> Forward:
    """`forward`, which keeps what its backward needs in CPU memory."""

    def run(batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        with kept_in_cpu_memory():
            return forward(batch, needs)

    return run


def move_tied(model: nn.Module, device: str) -> None:
    """Move a model; tied weights stay one parameter, which `Module.to` keeps on some devices only.

    Where a parameter cannot change its device in place, `Module.to` makes a new one in each module that has it.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                places.setdefault(id(weight), []).append((module, name))
    model.to(device)
    for (first, name), *others in places.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _whole(name: str, weight: Tensor) -> Tensor:
    return weight.detach()


@torch.no_grad()
def _placed(empty: Any, value: Tensor, trained: bool) -> nn.Parameter:
    return nn.Parameter(value.to("cpu", copy=True), requires_grad=trained)
