"""Settings that only the `megatron` engine has: `actor.backend: {name: megatron, parallel: {tensor: 2}}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hone.config import Config, setting
from hone.engines.settings import BackendSettings
from hone.platforms.layout import Layout

RecomputedModule = Literal["core_attn", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""Parts of a layer, by Megatron's names."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of ranks in each dimension of the mesh; data x context x tensor x pipeline is all of them."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual: int  # parts of the model on each pipeline stage
    sequence: bool
    expert_tensor: int = 1

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


class MegatronParallel(Config):
    """Division of a model and its batches between ranks. All remaining ranks split batches (data parallel)."""

    tensor: int = setting(1, "ranks that split each layer's matrices, the embedding and the head", ge=1)
    sequence: bool = setting(False, "tensor ranks also split the tokens between those matrices")
    pipeline: int = setting(1, "stages of consecutive layers", ge=1)
    virtual_pipeline: int = setting(1, "parts of the model on each stage, so that stages idle less", ge=1)
    layers: tuple[int, ...] | None = setting(
        None, "layers of each part of the model, in their order; null: as even as possible, the first parts have more"
    )
    context: int = setting(1, "ranks that split the tokens of each micro-batch (Ulysses)", ge=1)
    expert: int = setting(1, "ranks that split the experts; the same ranks as above, not additional ones", ge=1)
    expert_tensor: int = setting(
        1, "ranks that split the matrices of each expert, whatever `tensor` is; not additional ranks", ge=1
    )

    def sizes(self, world: int) -> Sizes:
        """The mesh over `world` ranks. Raises ValueError naming the dimension that does not fit."""
        rest = world
        for name, size in (("tensor", self.tensor), ("context", self.context), ("pipeline", self.pipeline)):
            if rest % size:
                whole = f"{rest} of {world} ranks" if rest != world else f"{world} ranks"
                raise ValueError(f"{self.key_of(name)} = {size} does not divide {whole}")
            rest //= size
        if self.sequence and self.tensor == 1:
            raise ValueError(
                f"{self.key_of('sequence')} = true needs {self.key_of('tensor')} above 1: these ranks share the tokens"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"{self.key_of('virtual_pipeline')} = {self.virtual_pipeline} needs {self.key_of('pipeline')} above 1"
            )
        holders = rest * self.context * self.tensor
        if holders % (self.expert * self.expert_tensor):
            both = f" x {self.key_of('expert_tensor')} = {self.expert_tensor}" if self.expert_tensor > 1 else ""
            raise ValueError(
                f"{self.key_of('expert')} = {self.expert}{both} does not divide the {holders} ranks of one pipeline "
                "stage (data x context x tensor)"
            )
        return Sizes(
            data=rest,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            expert=self.expert,
            virtual=self.virtual_pipeline,
            sequence=self.sequence,
            expert_tensor=self.expert_tensor,
        )

    def layers_of_parts(self, layers: int, name: str) -> tuple[int, ...]:
        """Return the number of layers in each part of the model `name`. Raises ValueError if these are not all."""
        parts, said = self.pipeline * self.virtual_pipeline, self.layers
        product = (
            f"{self.key_of('pipeline')} = {self.pipeline} x {self.key_of('virtual_pipeline')} = {self.virtual_pipeline}"
        )
        if layers < parts:
            raise ValueError(f"{product}: {name} has {layers} layers, and each of {parts} parts needs one")
        if said is None:
            return tuple(layers // parts + (part < layers % parts) for part in range(parts))
        if len(said) != parts or sum(said) != layers or min(said) < 1:
            raise ValueError(
                f"{self.key_of('layers')} = {list(said)} should be {parts} numbers above 0 ({product}) with the sum "
                f"{layers}, which {name} has"
            )
        return said


class MegatronSettings(BackendSettings):
    """Megatron-Core's model and parallelism; gradients and optimizer state are sharded over data-parallel ranks."""

    dimensions: ClassVar[tuple[str, ...]] = ("tensor", "context", "pipeline", "virtual_pipeline", "expert")
    name: str = "megatron"
    parallel: MegatronParallel | None = setting(None, "how ranks divide the work; null: all ranks split batches")
    offload: bool = setting(False, "keep weights and optimizer state in CPU memory while the model is idle")
    recompute_modules: tuple[RecomputedModule, ...] | None = setting(
        None, "parts of each layer that `activation_checkpointing: selective` recomputes; null: core_attn"
    )

    def alone(self) -> MegatronSettings:
        return self.model_copy(update={"parallel": None})

    def layout(self, ranks: int) -> Layout:
        sizes = (self.parallel or MegatronParallel()).sizes(ranks)
        return Layout(
            replicate=sizes.data,
            sequence=sizes.context,
            tensor=sizes.tensor,
            expert=sizes.expert * sizes.expert_tensor,
            pipeline=sizes.pipeline,
            parts=sizes.virtual,
            whole=True,
            between=sizes.sequence,
        )
