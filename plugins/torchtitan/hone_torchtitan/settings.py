"""Settings that only the `torchtitan` engine has: `actor.backend: {name: torchtitan, parallel: {tensor: 2}}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hone.config import Config, setting
from hone.engines.settings import BackendSettings
from hone.platforms.layout import Layout


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of ranks in each dimension of the mesh; replicate x shard x tensor is all of them."""

    replicate: int
    shard: int
    tensor: int
    sequence: bool

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.tensor


class TitanParallel(Config):
    """Division of a model and its batches between ranks; by default both are sharded over all ranks (FSDP)."""

    replicate: int = setting(1, "copies of the sharded model, each with batches of its own (HSDP)", ge=1)
    shard: int | None = setting(None, "ranks that shard weights and batches; null: all remaining ranks", ge=1)
    tensor: int = setting(1, "ranks that split each layer's matrices, the embedding and the head", ge=1)
    sequence: bool = setting(False, "tensor ranks also split the tokens between those matrices")

    def sizes(self, world: int) -> Sizes:
        """The mesh over `world` ranks. Raises ValueError naming the dimension that does not fit."""
        rest = world
        for name, size in (("replicate", self.replicate), ("tensor", self.tensor)):
            if rest % size:
                whole = f"{rest} of {world} ranks" if rest != world else f"{world} ranks"
                raise ValueError(f"{self.key_of(name)} = {size} does not divide {whole}")
            rest //= size
        if self.shard is not None and self.shard != rest:
            raise ValueError(
                f"{self.key_of('shard')} = {self.shard}, but {rest} of {world} ranks are left for it: replicate x "
                f"shard x tensor should be {world}; leave it null, or change the number of ranks"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                f"{self.key_of('sequence')} = true needs {self.key_of('tensor')} above 1: these ranks share the tokens"
            )
        return Sizes(self.replicate, rest, self.tensor, self.sequence)


class TitanSettings(BackendSettings):
    """torchtitan's model and parallelism; weights, gradients and optimizer state are sharded over ranks (FSDP2)."""

    dimensions: ClassVar[tuple[str, ...]] = ("replicate", "tensor")
    name: str = "torchtitan"
    parallel: TitanParallel | None = setting(
        None, "how ranks divide the work; null: all ranks shard weights and split batches (FSDP)"
    )

    def alone(self) -> TitanSettings:
        return self.model_copy(update={"parallel": None})

    def layout(self, ranks: int) -> Layout:
        sizes = (self.parallel or TitanParallel()).sizes(ranks)
        return Layout(sizes.replicate, sizes.shard, tensor=sizes.tensor, between=sizes.sequence)
