"""Vision-language models: the forward of a transformers model with images, for training and rollout.

    patches of the images of a row --visual tower, each image once--> features --at--> embeddings of the row
    token ids ---------------------embedding--------------------------------------------^    |
    positions [R, 3] (frame, row, column) --------------------------------------> language model --> hidden states

The vision tower has its own attention within each image; only the language model's attention is packed. Training and
rollout both call `see`, so they compute the same. A placeholder without an image (a policy may sample one) is an
ordinary token here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Supported architectures (`model_type`); a check at start-up verifies what they have in common."""

Grid = tuple[int, int, int]  # frames, rows, columns of patches


def auto_class(model_type: str) -> Any:
    """The transformers class that loads a language model of this type, with its vision tower if it has one."""
    return AutoModelForImageTextToText if model_type in FAMILIES else AutoModelForCausalLM


def attention_names(model_type: str, name: str) -> str | dict[str, str]:
    """`attn_implementation` that sets the language model's attention to `name` and keeps the vision tower's own."""
    return {"text_config": name, "vision_config": "sdpa"} if model_type in FAMILIES else name


def sees_images(config: PreTrainedConfig) -> bool:
    """Return whether a model of this config has a supported vision tower."""
    return config.model_type in FAMILIES


@dataclass(frozen=True, slots=True)
class RowImages:
    """The distinct images of one packed row, and the positions of their features."""

    patches: Tensor  # [P, D], all images concatenated
    grids: Tensor  # [I, 3] int64
    feature: Tensor  # [M] int64: index of each placeholder's feature among the features of all images
    at: Tensor  # [M] int64: position of the placeholder in the row

    def within(self, start: int, length: int) -> RowImages:
        """The images for a slice of the row, without placeholders outside it."""
        here = (self.at >= start) & (self.at < start + length)
        return RowImages(self.patches, self.grids, self.feature[here], self.at[here] - start)


# ------------------------------------------------------------------------------------------------------- positions


def merge_size(config: PreTrainedConfig) -> int:
    """Patches per side that are merged into one token."""
    return int(config.vision_config.spatial_merge_size)


def positions_of(length: int, images: Sequence[tuple[int, Grid]], merge: int) -> tuple[Tensor, int]:
    """Positions [length, 3] of one sequence, and the offset of the next token's position from its index.

    `images` are (first placeholder, grid) in order. Text tokens count up in all three dimensions. Tokens of an image
    have its frame, row and column, counted from the start of the image; text continues after the largest of these.
    Source: Qwen2-VL (https://arxiv.org/abs/2409.12191), `get_rope_index` of its transformers model.
    """
    positions = torch.arange(length)[:, None].repeat(1, 3)
    shift = 0
    for start, (frames, rows, columns) in images:
        rows, columns = rows // merge, columns // merge
        count = frames * rows * columns
        place = torch.arange(count)
        parts = torch.stack([place // (rows * columns), place // columns % rows, place % columns], 1)
        positions[start : start + count] = (parts + (start + shift))[: length - start]
        shift += max(rows, columns) - count
        positions[start + count :] += max(rows, columns) - count
    return positions, shift


# --------------------------------------------------------------------------------------------------------- forward


def hidden_states(body: Any, token_ids: Tensor, position_ids: Tensor, images: RowImages | None) -> Tensor:
    """Hidden states [R, H] of a row, for any model: token ids [R], positions [R] or [R, 3], and the row's images.

    `body` is the model without its head; call this inside `packed`. Raises ValueError for images if it has no tower.
    """
    if sees_images(body.config):
        enter = getattr(body, "_hone_inside", None)  # a sharded body has complete weights only inside its own forward
        if enter is None:
            return see(body, token_ids, position_ids, images)
        return enter(lambda: see(body, token_ids, position_ids, images))  # type: ignore[no-any-return]
    if images is not None:
        raise ValueError(f"the batch has images, but a model of type {body.config.model_type!r} takes none")
    output = body(input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False)
    states: Tensor = output.last_hidden_state[0]
    return states


def see(body: Any, token_ids: Tensor, position_ids: Tensor, images: RowImages | None) -> Tensor:
    """`hidden_states` of a model with a vision tower.

    Without images the tower still runs on a blank one, whose features are unused, if it is trained or sharded: every
    step needs its gradients, and all ranks have to run a sharded tower together.
    """
    embedded: Tensor = body.get_input_embeddings()(token_ids)
    deep: dict[str, Any] = {}
    if images is None and (_is_sharded(body.visual) or _learns(body.visual)):
        images = _blank(body, token_ids.device)
    if images is not None:
        features, levels = _features(body, images, embedded.dtype)
        # connect unused features too, so that every rank has gradients for the same weights
        unused = torch.stack([(part * 0).sum() for part in (features, *levels)]).sum()
        embedded = embedded.index_copy(0, images.at, features[images.feature]) + unused
        if levels:
            shown = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(0, images.at, True)
            order = images.feature[images.at.argsort()]
            deep = {"visual_pos_masks": shown[None], "deepstack_visual_embeds": [level[order] for level in levels]}
    positions = (position_ids if position_ids.dim() == 2 else position_ids[:, None].expand(-1, 3)).T[:, None]
    output = body.language_model(
        input_ids=None, inputs_embeds=embedded[None], position_ids=positions, use_cache=False, **deep
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def _features(body: Any, images: RowImages, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Features [F, H] of all images, and those that enter deeper layers (Qwen3-VL)."""
    tower = body.visual
    patches = images.patches.to(next(tower.patch_embed.parameters()).dtype)
    frozen = not any(one.requires_grad for one in tower.parameters())
    with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
        found = tower(patches, grid_thw=images.grids)
    levels = getattr(found, "deepstack_features", None) or []
    return found.pooler_output.to(dtype), [level.to(dtype) for level in levels]


def _is_sharded(tower: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in tower.modules())


def _learns(tower: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tower.parameters())


def _blank(body: Any, device: torch.device) -> RowImages:
    """The smallest image, without a placeholder."""
    side = merge_size(body.config)
    nowhere = torch.zeros(0, dtype=torch.int64, device=device)
    patches = torch.zeros(side * side, patch_values(body.config), device=device)
    return RowImages(patches, torch.tensor([[1, side, side]], device=device), nowhere, nowhere)


def patch_values(config: PreTrainedConfig) -> int:
    """Values per patch: channels x frames x rows x columns."""
    vision = config.vision_config
    channels = vision.in_channels if hasattr(vision, "in_channels") else vision.in_chans
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)


def freeze_tower(model: nn.Module) -> None:
    """Freeze the vision tower: its weights get no gradients, and no optimizer gets them."""
    for name, parameter in model.named_parameters():
        if name.startswith("visual.") or ".visual." in name:
            parameter.requires_grad_(False)


__all__ = [
    "FAMILIES",
    "RowImages",
    "attention_names",
    "auto_class",
    "freeze_tower",
    "hidden_states",
    "positions_of",
    "sees_images",
]
