"""Vision-language models: what a transformers model that sees images is given, whoever runs it.

    patches of the images of a row --visual tower, each image once--> features --at--> embeddings of the row
    token ids ---------------------embedding--------------------------------------------^    |
    positions [R, 3] (frame, row, column) --------------------------------------> language model --> hidden states

The tower has an attention of its own, within each image; only the language model's attention is packed. Training and
rollout both run a row through `see`, so both compute alike. A placeholder that no image was put on (a policy may sample
one) is a token like any other here.
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
"""Architectures (`model_type`) whose images are run here; what is common to them is checked at start-up."""

Grid = tuple[int, int, int]  # frames, rows, columns of patches


def auto_class(model_type: str) -> Any:
    """The class of transformers that loads a whole language model of this type, with its vision tower if it has one."""
    return AutoModelForImageTextToText if model_type in FAMILIES else AutoModelForCausalLM


def attention_names(model_type: str, name: str) -> str | dict[str, str]:
    """`attn_implementation` with which the language model's attention is `name`, and a vision tower's its own."""
    return {"text_config": name, "vision_config": "sdpa"} if model_type in FAMILIES else name


def sees_images(config: PreTrainedConfig) -> bool:
    """Whether a model of this config has a vision tower that is run here."""
    return config.model_type in FAMILIES


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of one packed row: each different one once, and where their features go."""

    patches: Tensor  # [P, D], of all images end to end
    grids: Tensor  # [I, 3] int64
    feature: Tensor  # [M] int64: which feature (of all images end to end) each placeholder takes
    at: Tensor  # [M] int64: where the placeholder is in the row

    def within(self, start: int, length: int) -> RowImages:
        """The same images for a slice of the row: placeholders elsewhere are left out."""
        here = (self.at >= start) & (self.at < start + length)
        return RowImages(self.patches, self.grids, self.feature[here], self.at[here] - start)


# ------------------------------------------------------------------------------------------------------- positions


def merge_size(config: PreTrainedConfig) -> int:
    """Patches of a side that become one token."""
    return int(config.vision_config.spatial_merge_size)


def positions_of(length: int, images: Sequence[tuple[int, Grid]], merge: int) -> tuple[Tensor, int]:
    """Positions [length, 3] of one sequence, and how far a token after it is ahead of its place in the sequence.

    `images` are (first placeholder, grid) in order. Text counts up in all three; the tokens of an image have its frame,
    row and column, counted from where the image begins, and text goes on after the largest of these.
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
    """Hidden states [R, H] of a row of any model: token ids [R], positions [R] or [R, 3], and the row's images.

    `body` is the model without its head; call it inside `packed`. Raises ValueError for images that it cannot see.
    """
    if sees_images(body.config):
        enter = getattr(body, "_hone_inside", None)  # a body that is sharded by itself has whole weights only inside
        if enter is None:
            return see(body, token_ids, position_ids, images)
        return enter(lambda: see(body, token_ids, position_ids, images))  # type: ignore[no-any-return]
    if images is not None:
        raise ValueError(f"the batch shows images, but a model of type {body.config.model_type!r} sees none")
    output = body(input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False)
    states: Tensor = output.last_hidden_state[0]
    return states


def see(body: Any, token_ids: Tensor, position_ids: Tensor, images: RowImages | None) -> Tensor:
    """`hidden_states` of a model with a vision tower.

    Without images, the tower is shown a blank one whose features count for nothing where somebody waits for it: its
    gradients belong to every step, and where it is sharded all ranks have to run it together.
    """
    embedded: Tensor = body.get_input_embeddings()(token_ids)
    deep: dict[str, Any] = {}
    if images is None and (_is_sharded(body.visual) or _learns(body.visual)):
        images = _blank(body, token_ids.device)
    if images is not None:
        features, levels = _features(body, images, embedded.dtype)
        # what no token takes is connected too: every rank then has gradients for the same weights
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
    """Features [F, H] of all images end to end, and those that go into deeper layers (Qwen3-VL)."""
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
    """The smallest image, which no token shows."""
    side = merge_size(body.config)
    nowhere = torch.zeros(0, dtype=torch.int64, device=device)
    patches = torch.zeros(side * side, patch_values(body.config), device=device)
    return RowImages(patches, torch.tensor([[1, side, side]], device=device), nowhere, nowhere)


def patch_values(config: PreTrainedConfig) -> int:
    """Numbers in one patch: channels x frames x rows x columns."""
    vision = config.vision_config
    channels = vision.in_channels if hasattr(vision, "in_channels") else vision.in_chans
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)


def freeze_tower(model: nn.Module) -> None:
    """Keep the vision tower as it is: its weights get no gradients, and no optimizer sees them."""
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
