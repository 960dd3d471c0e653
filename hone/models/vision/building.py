"""The transformers config of a vision-language model that hone builds."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, VisionBuildConfig
from hone.models.tokenizer import SPECIAL_TOKENS, VISION_TOKENS
from hone.registry import unknown

BUILT = ("qwen2_5_vl", "qwen3_vl")


def vision_language_config(build: BuildConfig) -> PreTrainedConfig:
    """The config of `build`; `build.vision` describes the vision tower.

    Raises ModelError for another architecture, a missing section, or an option that the architecture does not have.
    """
    if build.architecture not in BUILT:
        raise ModelError(
            f"model.build.vision is set, but hone cannot build a vision tower for architecture "
            f"{build.architecture!r}; remove it, or choose one of {', '.join(BUILT)}"
        )
    if build.vision is None:
        raise ModelError(f"model.build.architecture {build.architecture!r} takes images: set model.build.vision")
    cls: Any = CONFIG_MAPPING[build.architecture]
    kinds = cls.sub_configs
    special = (*SPECIAL_TOKENS, *VISION_TOKENS)
    numbers = {token: number for number, token in enumerate(special)}
    start, image, end, video = (numbers[token] for token in VISION_TOKENS)
    config: PreTrainedConfig = cls(
        text_config=_checked(kinds["text_config"], "options", _text(build, len(special)), build.options),
        vision_config=_checked(
            kinds["vision_config"], "vision.options", _vision(build, build.vision), build.vision.options
        ),
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=build.tie_embeddings,
    )
    return config


def _text(build: BuildConfig, special: int) -> dict[str, Any]:
    head = build.head_size or build.hidden_size // build.heads
    if build.architecture == "qwen2_5_vl" and head * build.heads != build.hidden_size:
        raise ModelError(
            f"model.build.head_size={head}: {build.architecture} needs heads x head_size = hidden_size, which is "
            f"{build.hidden_size}"
        )
    spatial = head // 2 * 5 // 16  # rotary dimensions for row and column each
    sections = [head // 2 - 2 * spatial, spatial, spatial]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    values: dict[str, Any] = {
        "vocab_size": special + len(build.characters),
        "hidden_size": build.hidden_size,
        "num_hidden_layers": build.layers,
        "num_attention_heads": build.heads,
        "num_key_value_heads": build.kv_heads or build.heads,
        "intermediate_size": build.mlp_size,
        "max_position_embeddings": build.max_positions,
        "rope_parameters": rope,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if build.architecture == "qwen3_vl":
        rope["mrope_interleaved"] = True
        values["head_dim"] = head
    return values


def _vision(build: BuildConfig, vision: VisionBuildConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "hidden_size": vision.hidden_size,
        "depth": vision.layers,
        "num_heads": vision.heads,
        "intermediate_size": vision.mlp_size,
        "patch_size": vision.patch_size,
        "spatial_merge_size": vision.merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "out_hidden_size": build.hidden_size,
    }
    if build.architecture == "qwen2_5_vl":
        return values | {"fullatt_block_indexes": [vision.layers - 1]}
    return values | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}


def _checked(cls: Any, key: str, values: dict[str, Any], options: dict[str, Any]) -> PreTrainedConfig:
    known = [*cls.__dataclass_fields__, *cls.attribute_map]
    for option in options:
        if option not in known:
            raise ModelError(f"model.build.{key}: " + unknown(f"setting of {cls.__name__}", option, sorted(known)))
    made: PreTrainedConfig = cls(**{**values, **options})
    return made


__all__ = ["BUILT", "vision_language_config"]
