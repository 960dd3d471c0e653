"""Settings of a model: where it comes from, or how it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hone.config import Config, setting

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # printable ASCII
DType = Literal["float32", "bfloat16", "float64"]


class VisionBuildConfig(Config):
    """The vision tower of a built model, and the size of its patches."""

    hidden_size: int = setting(64, "width of the tower", ge=1)
    layers: int = setting(2, "number of blocks", ge=1)
    heads: int = setting(4, "attention heads", ge=1)
    mlp_size: int = setting(128, "width of the MLP's inner layer", ge=1)
    patch_size: int = setting(8, "side of a patch", unit="pixels", ge=1)
    merge_size: int = setting(2, "patches of a side that become one token", unit="patches", ge=1)
    temporal_patch_size: int = setting(2, "frames of a patch; a still image is repeated", unit="frames", ge=1)
    max_pixels: int = setting(65536, "larger images are scaled down to this area", unit="pixels", ge=1)
    options: dict[str, Any] = setting(
        factory=dict, meaning="other settings of the tower's transformers config, such as window_size"
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> VisionBuildConfig:
        if self.hidden_size % (4 * self.heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} should be a multiple of 4 x heads={self.heads}: positions of rows "
                "and columns turn pairs of numbers in each head"
            )
        return self


class VisionConfig(Config):
    """Use of a vision model."""

    freeze_tower: bool = setting(False, "train the language model only, not the vision tower")
    min_pixels: int | None = setting(None, "smaller images are scaled up; null: as the model's processor", ge=1)
    max_pixels: int | None = setting(None, "larger images are scaled down; null: as the model's processor", ge=1)


class BuildConfig(Config):
    """A model built with random weights, and a tokenizer of single characters."""

    architecture: str = setting("qwen3", "model type as transformers names it: qwen3, llama, qwen3_moe ...")
    hidden_size: int = setting(128, "width of the residual stream", ge=1)
    layers: int = setting(4, "number of decoder layers", ge=1)
    heads: int = setting(4, "query heads", ge=1)
    kv_heads: int | None = setting(None, "key and value heads; null: as many as query heads", ge=1)
    head_size: int | None = setting(None, "width of one head; null: hidden_size / heads", ge=1)
    mlp_size: int = setting(384, "width of the MLP's inner layer", ge=1)
    max_positions: int = setting(1024, "longest sequence", unit="tokens", ge=1)
    tie_embeddings: bool = setting(True, "one matrix for the token embeddings and the output head")
    characters: str = setting(CHARACTERS, "the alphabet: one token for each character")
    options: dict[str, Any] = setting(
        factory=dict, meaning="other settings of the architecture's transformers config, such as num_experts"
    )
    vision: VisionBuildConfig | None = setting(None, "a vision tower, for qwen2_5_vl and qwen3_vl")
    seed: int = setting(0, "of the random weights")

    @model_validator(mode="after")
    def _sizes_fit(self) -> BuildConfig:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads={self.heads} should be a multiple of kv_heads={self.kv_heads}")
        if self.head_size is None and self.hidden_size % self.heads:
            raise ValueError(f"hidden_size={self.hidden_size} should be a multiple of heads={self.heads}")
        return self


class FourBitConfig(Config):
    """Frozen linear layers in 4 bits, by bitsandbytes (QLoRA). The head is not quantised."""

    kind: Literal["nf4", "fp4"] = setting("nf4", "the 16 levels: quantiles of a normal distribution, or 4-bit floats")
    double: bool = setting(True, "also quantise the scale of each block of 64 weights, from 32 to 8 bits")
    skip: tuple[str, ...] = setting((), "layers that are not quantised, by names in their paths (o_proj, layers.0)")


class UseConfig(Config):
    """Options of a model that override or extend its config.json."""

    context: int | None = setting(
        None,
        "longest sequence of the run, by which longrope and dynamic rotary positions choose their frequencies; null: "
        "the length before scaling",
        unit="tokens",
        ge=1,
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | Literal["config"] = setting(
        0.0, "share of activations and attention weights dropped in training; config: as the model's config says"
    )
    vision: VisionConfig | None = setting(None, "how images are used, for a model that sees them")


class ModelConfig(Config):
    """A causal language model in the Hugging Face format: exactly one of `path` and `build`."""

    path: str | None = setting(None, "folder, GGUF file, or name on the Hugging Face hub")
    build: BuildConfig | None = setting(None, "make a model with random weights instead")
    revision: str | None = setting(None, "branch, tag or commit on the hub; null: its main branch")
    tokenizer: str | None = setting(None, "folder or hub name of the tokenizer; null: the model's own")
    trust_remote_code: bool = setting(False, "run Python code that comes with the model")
    dtype: DType = setting("float32", "dtype of the stored weights, which the optimizer updates")
    use: UseConfig | None = setting(None, "how the model is used, beyond what its config says")

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.build is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(f"exactly one of path and build should be set, found {found}")
        return self

    def key_of(self, name: str) -> str:
        """As for any section; of a model that no run file names, a key of the section `model`."""
        return super().key_of(name) if self._prefix else f"model.{name}"

    @property
    def used(self) -> UseConfig:
        """The settings `use`, or their defaults."""
        return self.use or UseConfig()

    def at(self, folder: str | Path) -> ModelConfig:
        """The same settings with the weights in another folder."""
        moved = ModelConfig(path=str(folder), dtype=self.dtype, use=self.use)
        moved._prefix = self._prefix
        return moved
