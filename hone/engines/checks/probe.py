"""Checks at start-up that a model behaves as the engine assumes.

Packed attention and the chunked head replace parts of a transformers model. Instead of keeping a list of supported
architectures, the engine runs eleven tokens through the model and refuses it if the results differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.engines.logprobs import Head
from hone.models.attention.packed import Packing, packed
from hone.models.errors import ModelError
from hone.models.vision.model import RowImages, hidden_states, patch_values, positions_of, sees_images
from hone.platforms.base import current_platform

_MANY = (32, 16)  # sequences and tokens in each, for noise that few tokens show
_SHARED, _OWN = 3, (2, 3)  # two sequences with 3 tokens in common, then 2 and 3 of their own


@torch.no_grad()
def check_body(body: Any, name: str) -> Tensor:
    """Raise ModelError if packed sequences see each other or later tokens. Returns the hidden states of the probe.

    This runs the loaded weights in the run's precision, so it sees large differences; `isolation` finds small ones.
    """
    tokens, positions = _probe(body)
    first = _states(body, tokens, positions, _whole(tokens.device), name)
    other = (tokens + 1) % body.config.get_text_config().vocab_size
    second = tokens.clone()
    cut = _SHARED + _OWN[0]
    second[:cut], second[-1] = other[:cut], other[-1]
    changed = _states(body, second, positions, _whole(tokens.device), name)
    kept = slice(cut, -1)  # neither the neighbour nor the last token may change these
    _compare(first[kept], changed[kept], name, "if another sequence or later tokens change")
    row = torch.cat([torch.arange(cut), torch.arange(cut + _SHARED, len(tokens))]).to(tokens.device)
    ends = torch.tensor([0, _SHARED, cut, len(row)], device=tokens.device)
    shared = _states(body, tokens[row], positions[row], Packing.of(ends, [None, 0, 0]), name)
    _compare(first[row], shared, name, "if two sequences share their first tokens")
    return first


@torch.no_grad()
def check_training(body: Any, name: str) -> None:
    """Raise ModelError if a body without dropout gives other results in training mode: some noise is still on.

    A body that draws random numbers in training runs many tokens, because noise may change few of them: PhiMoE draws
    an expert only where two are almost equally good. Disable an adapter first, because its dropout stays on.
    """
    tokens, positions = _probe(body)
    before = current_platform().rng_state()
    _compare_modes(body, tokens, positions, _whole(tokens.device), name)
    after = current_platform().rng_state()
    if all(torch.equal(before[device], state) for device, state in after.items()):
        return
    count, length = _MANY
    starts = torch.arange(0, count * length + 1, length, device=tokens.device)
    places = torch.arange(count * length, device=tokens.device)
    tokens = (places * 7919 + 3) % body.config.get_text_config().vocab_size
    _compare_modes(body, tokens, places % length, Packing.of(starts), name)


def _compare_modes(body: Any, tokens: Tensor, positions: Tensor, packing: Packing, name: str) -> None:
    evaluated = _states(body, tokens, positions, packing, name)
    body.train()
    trained = _states(body, tokens, positions, packing, name)
    body.eval()
    gap, scale = (evaluated - trained).float().norm(dim=-1), evaluated.float().norm(dim=-1)
    worst = int((gap / scale.clamp(min=1e-30)).argmax())  # of each token by itself: some have states of enormous size
    if not bool(gap[worst] <= _tolerance(evaluated) * scale[worst]):
        raise ModelError(
            f"{name} computes differently in training: a token's hidden state changes by {float(gap[worst]):.3g} (of "
            f"{float(scale[worst]):.3g}) with model.use.dropout: 0; set model.use.dropout: config to train with "
            "the noise of its own config"
        )


@torch.no_grad()
def check_images(body: Any, name: str) -> None:
    """Raise ModelError if hone's forward of an image differs from the model's own; skip models of text only.

    The model's own forward gets the patches and the positions from its own `get_rope_index`.
    """
    if not sees_images(body.config):
        return
    device, config = next(body.parameters()).device, body.config
    merge = config.vision_config.spatial_merge_size
    grid = (1, 2 * merge, 3 * merge)
    tokens = torch.tensor([1, 2, *[config.image_token_id] * 6, 3, 4], device=device)
    is_image = (tokens == config.image_token_id).int()[None]
    grids = torch.tensor([grid], device=device)
    theirs, _ = body.get_rope_index(tokens[None], mm_token_type_ids=is_image, image_grid_thw=grids)
    ours = positions_of(len(tokens), [(2, grid)], merge)[0].to(device)
    if not torch.equal(theirs[:, 0].T, ours):
        raise ModelError(f"{name} cannot be trained with images: hone computes other position ids for its images")
    patches = torch.linspace(-1, 1, 6 * merge**2 * patch_values(config), device=device).sin().view(6 * merge**2, -1)
    whole = Packing.of(torch.tensor([0, len(tokens)], device=device))
    at = is_image[0].nonzero()[:, 0]
    with packed(whole):
        own = body(
            input_ids=tokens[None],
            position_ids=theirs,
            pixel_values=patches.to(body.dtype),
            image_grid_thw=grids,
            use_cache=False,
        ).last_hidden_state[0]
        found = hidden_states(body, tokens, ours, RowImages(patches, grids, at - 2, at))
    gap, scale = (own - found).abs().max(), own.abs().max()
    if not bool(gap <= _tolerance(own) * scale):
        raise ModelError(
            f"{name} cannot be trained with images: hidden states of hone's forward and of its own differ by "
            f"{float(gap):.3g} (of {float(scale):.3g})"
        )


@torch.no_grad()
def check_head(model: Any, hidden: Tensor, name: str) -> None:
    """Raise ModelError if the model's logits differ from `Head` applied to its body's hidden states."""
    tokens, positions = _probe(model)
    with packed(_whole(hidden.device)):
        # not `model(...)`: this runs inside the call of a sharded model, which must not be entered twice
        logits = model.forward(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
    gap = (Head.of(model).logits(hidden) - logits).abs().max()
    scale = logits.abs().max().float()
    if not bool(gap <= _tolerance(hidden) * scale):
        raise ModelError(
            f"{name} is not supported: its logits differ by {float(gap):.3g} (of {float(scale):.3g}) from head(hidden "
            "states), so it changes them in a way that hone does not know (scale, soft-capping)"
        )


def try_body(body: Any) -> None:
    """Run the two probe sequences through a body that passed `check_body`."""
    tokens, positions = _probe(body)
    _states(body, tokens, positions, _whole(tokens.device), "the model")


def _probe(model: Any) -> tuple[Tensor, Tensor]:
    """Token ids and positions of the two sequences, end to end."""
    device = next(model.parameters()).device
    first, second = (torch.arange(_SHARED + own, device=device) for own in _OWN)
    unlike = torch.cat([first, torch.where(second < _SHARED, second, second + 10)])  # equal in the shared tokens only
    return (unlike * 7 + 3) % model.config.get_text_config().vocab_size, torch.cat([first, second])


def _whole(device: torch.device) -> Packing:
    return Packing.of(torch.tensor([0, _SHARED + _OWN[0], 2 * _SHARED + sum(_OWN)], device=device))


def _compare(one: Tensor, other: Tensor, name: str, when: str) -> None:
    gap, scale = (one - other).abs().max(), one.abs().max()
    if not bool(gap <= _tolerance(one) * scale):
        raise ModelError(
            f"{name} cannot be trained on packed sequences: a token's hidden state changes by {float(gap):.3g} (of "
            f"{float(scale):.3g}) {when}; are there recurrent layers?"
        )


def _states(body: Any, tokens: Tensor, positions: Tensor, packing: Packing, name: str) -> Tensor:
    try:
        with packed(packing):
            output = body(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
    except (NotImplementedError, TypeError) as error:
        raise ModelError(f"{name} cannot be trained on packed sequences: {error}") from error
    states = getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor) or not bool(states.isfinite().all()):
        raise ModelError(f"{name}: hidden states are not finite; check its weights")
    result: Tensor = states[0]
    return result


def _tolerance(states: Tensor) -> float:
    """Relative tolerance: rounding differs a little when experts are computed in other groups."""
    return 0.05 if states.dtype == torch.bfloat16 else 1e-3
