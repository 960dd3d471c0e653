"""Settings of the `fsdp2` engine: `actor.backend: {name: fsdp2, parallel: {tensor: 2}}`, and of engines like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from hone.config import Config, setting
from hone.engines.settings import BackendSettings
from hone.platforms.layout import Layout


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of ranks in each dimension of the mesh; replicate x shard x sequence x tensor is all of them."""

    replicate: int
    shard: int
    sequence: int
    tensor: int
    expert: int

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor


class ShardConfig(Config):
    """Division of a model and its batches between ranks; by default both are sharded over all ranks (FSDP)."""

    replicate: int = setting(1, "copies of the sharded model, each with batches of its own (HSDP)", ge=1)
    shard: int | None = setting(None, "ranks that shard weights and batches; null: all remaining ranks", ge=1)
    sequence: int = setting(1, "ranks that split the tokens of each micro-batch (Ulysses)", ge=1)

    def sizes(self, world: int) -> Sizes:
        """The mesh over `world` ranks. Raises ValueError naming the dimension that does not fit."""
        rest = world
        replicate, sequence, tensor, expert = (
            getattr(self, name, 1) for name in ("replicate", "sequence", "tensor", "expert")
        )
        for name, size in (("replicate", replicate), ("sequence", sequence), ("tensor", tensor)):
            if rest % size:
                whole = f"{rest} of {world} ranks" if rest != world else f"{world} ranks"
                raise ValueError(f"{self.key_of(name)} = {size} does not divide {whole}")
            rest //= size
        if self.shard is not None and self.shard != rest:
            product = " x ".join(name for name in type(self).model_fields if name != "expert")
            raise ValueError(
                f"{self.key_of('shard')} = {self.shard}, but {rest} of {world} ranks are left for it: {product} "
                f"should be {world}; leave it null, or change the number of ranks"
            )
        holders = rest * sequence * tensor
        if holders % expert:
            raise ValueError(
                f"{self.key_of('expert')} = {expert} does not divide the {holders} ranks of one copy of the model "
                "(shard x sequence x tensor)"
            )
        if expert > 1 and expert % tensor:
            raise ValueError(f"{self.key_of('expert')} = {expert} should be a multiple of tensor = {tensor}")
        return Sizes(replicate, rest, sequence, tensor, expert)


class ParallelConfig(ShardConfig):
    """Division of a model and its batches between ranks; by default both are sharded over all ranks (FSDP)."""

    tensor: int = setting(1, "ranks that split each layer's matrices", ge=1)
    expert: int = setting(1, "ranks that split the experts; the same ranks as above, not additional ones", ge=1)


class ShardedSettings(BackendSettings):
    """Settings of every engine whose weights `fully_shard` shards."""

    dimensions: ClassVar[tuple[str, ...]] = ("replicate", "sequence")
    parallel: ShardConfig | None = setting(
        None, "how ranks divide the work; null: all ranks shard weights and split batches (FSDP)"
    )
    offload: bool = setting(False, "keep weights and optimizer state in CPU memory while the model is idle")

    def alone(self) -> Self:
        return self.model_copy(update={"parallel": None})

    def layout(self, ranks: int) -> Layout:
        sizes = (self.parallel or ShardConfig()).sizes(ranks)
        return Layout(sizes.replicate, sizes.shard, sizes.sequence, sizes.tensor, sizes.expert)


class Fsdp2Settings(ShardedSettings):
    """PyTorch's FSDP2 around a transformers model, with transformers' own tensor and expert plans."""

    dimensions: ClassVar[tuple[str, ...]] = ("replicate", "tensor", "sequence", "expert")
    name: str = "fsdp2"
    parallel: ParallelConfig | None = setting(
        None, "how ranks divide the work; null: all ranks shard weights and split batches (FSDP)"
    )
    compile: bool | Literal["aot_eager"] = setting(
        False, "compile each layer with torch.compile; aot_eager: without generating code, to find errors faster"
    )
