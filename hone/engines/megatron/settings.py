"""Settings that only the `megatron` engine has: `actor.backend: {name: megatron, parallel: {tensor: 2}}`."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config import Config, setting
from hone.engines.settings import BackendSettings


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks each dimension of the mesh has; data x context x tensor x pipeline is all of them."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual: int  # parts of the model on each pipeline stage
    sequence: bool

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


class MegatronParallel(Config):
    """How ranks divide a model and its batches. All remaining ranks split batches (data parallel)."""

    tensor: int = setting(1, "ranks that split each layer's matrices, the embedding and the head", ge=1)
    sequence: bool = setting(False, "tensor ranks also split the tokens between those matrices")
    pipeline: int = setting(1, "stages of consecutive layers", ge=1)
    virtual_pipeline: int = setting(1, "parts of the model on each stage, so that stages idle less", ge=1)
    context: int = setting(1, "ranks that split the tokens of each micro-batch (Ulysses)", ge=1)
    expert: int = setting(1, "ranks that split the experts; the same ranks as above, not additional ones", ge=1)

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
        if holders % self.expert:
            raise ValueError(
                f"{self.key_of('expert')} = {self.expert} does not divide the {holders} ranks of one pipeline stage "
                "(data x context x tensor)"
            )
        return Sizes(rest, self.tensor, self.pipeline, self.context, self.expert, self.virtual_pipeline, self.sequence)


class MegatronSettings(BackendSettings):
    """Megatron-Core's model and parallelism; gradients and optimizer state are sharded over data-parallel ranks."""

    name: str = "megatron"
    parallel: MegatronParallel | None = setting(None, "how ranks divide the work; null: all ranks split batches")

    def alone(self) -> MegatronSettings:
        return self.model_copy(update={"parallel": None})
