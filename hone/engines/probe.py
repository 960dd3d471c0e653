"""Trying a model out before training: does this architecture do what the engine assumes of every architecture?

Packed attention and the chunked head take the place of parts of a transformers model. Rather than trust a list of
architectures, eight tokens are run through the model at start-up, and one that behaves otherwise is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.engines.logprobs import Head
from hone.models.attention import packed
from hone.models.errors import ModelError

_LENGTHS = (3, 5)


@torch.no_grad()
def check_body(body: Any, name: str) -> Tensor:
    """Refuse a body whose packed sequences see each other, or later tokens. Returns hidden states of the probe.

    Raises ModelError. State-space and linear-attention layers carry their state across packed sequences, for example.
    """
    vocabulary = body.config.get_text_config().vocab_size
    device = next(body.parameters()).device
    tokens = (torch.arange(sum(_LENGTHS), device=device) * 7 + 3) % vocabulary
    first = _states(body, tokens, name)
    other = tokens.clone()
    other[: _LENGTHS[0]] = (tokens[: _LENGTHS[0]] + 1) % vocabulary
    other[-1] = (tokens[-1] + 1) % vocabulary
    second = _states(body, other, name)
    kept = slice(_LENGTHS[0], -1)  # neither the neighbour nor the last token may change these
    gap = (first[kept] - second[kept]).abs().max()
    scale = first[kept].abs().max()
    if not bool(gap <= _tolerance(first) * scale):
        raise ModelError(
            f"{name} cannot be trained on packed sequences: a token's hidden state changes by {float(gap):.3g} (of "
            f"{float(scale):.3g}) with tokens of another sequence, or with later ones; are there recurrent layers?"
        )
    return first


@torch.no_grad()
def check_head(model: Any, hidden: Tensor, name: str) -> None:
    """Refuse a model whose logits are not those of `Head` on its body's hidden states. Raises ModelError."""
    tokens = (torch.arange(sum(_LENGTHS), device=hidden.device) * 7 + 3) % model.config.get_text_config().vocab_size
    with packed(_cu_seqlens(hidden.device)):
        logits = model(input_ids=tokens[None], position_ids=_positions(hidden.device), use_cache=False).logits[0]
    gap = (Head.of(model).logits(hidden) - logits).abs().max()
    scale = logits.abs().max().float()
    if not bool(gap <= _tolerance(hidden) * scale):
        raise ModelError(
            f"{name} does more to its logits than hone knows of (scale, soft-capping): they differ by {float(gap):.3g} "
            f"(of {float(scale):.3g}) from head(hidden states)"
        )


def _states(body: Any, tokens: Tensor, name: str) -> Tensor:
    try:
        with packed(_cu_seqlens(tokens.device)):
            output = body(input_ids=tokens[None], position_ids=_positions(tokens.device), use_cache=False)
    except (NotImplementedError, TypeError) as error:
        raise ModelError(f"{name} cannot be trained on packed sequences: {error}") from error
    states = getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor) or not bool(states.isfinite().all()):
        raise ModelError(f"{name} gives no finite hidden states; are its weights sound?")
    result: Tensor = states[0]
    return result


def _cu_seqlens(device: torch.device) -> Tensor:
    return torch.tensor([0, _LENGTHS[0], sum(_LENGTHS)], device=device)


def _positions(device: torch.device) -> Tensor:
    return torch.cat([torch.arange(n, device=device) for n in _LENGTHS])[None]


def _tolerance(states: Tensor) -> float:
    """Relative: rounding differs a little where experts are computed in other groups."""
    return 0.05 if states.dtype == torch.bfloat16 else 1e-3
