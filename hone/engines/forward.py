"""One forward of one micro-batch: packed tokens in, `ModelOutput` out, for both model types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.engines.layout import lay_out
from hone.engines.logprobs import Head, score_tokens
from hone.models.attention import packed
from hone.models.loading import ValueModel
from hone.types import Batch, ModelOutput

Forward = Callable[[Batch, frozenset[str]], ModelOutput]


def trained_rows(batch: Batch) -> Tensor:
    """Indices of the tokens with a loss, [R]. Raises ValueError if a first token is one: nothing predicts it."""
    if batch.num_sequences and bool(batch.loss_mask[batch.cu_seqlens[:-1]].any()):
        raise ValueError("loss_mask is 1 on the first token of a sequence, which has no log-prob")
    return batch.loss_mask.nonzero()[:, 0]


def states_before(body: Any, batch: Batch, rows: Tensor) -> Tensor:
    """The body's last hidden state before each of the tokens `rows`: [R, H]."""
    layout = lay_out(batch)
    with packed(layout.packing):
        output = body(input_ids=layout.token_ids[None], position_ids=layout.position_ids[None], use_cache=False)
    states: Tensor = output.last_hidden_state[0]
    return states.index_select(0, layout.where[rows - 1])


def language_forward(model: Any, temperature: float, chunk_tokens: int) -> Forward:
    """Log-probs (and entropy, sum_pi_squared when needed) of every token with a loss."""

    def forward(batch: Batch, needs: frozenset[str]) -> ModelOutput:
        rows = trained_rows(batch)
        scores = score_tokens(
            states_before(model.base_model, batch, rows),
            batch.token_ids[rows],
            Head.of(model),
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            needs=needs,
        )
        squared = scores.sum_pi_squared
        return ModelOutput(
            logprobs=_spread(scores.logprobs, rows, batch.num_tokens),
            entropy=_spread(scores.entropy, rows, batch.num_tokens) if scores.entropy is not None else None,
            extras={"sum_pi_squared": _spread(squared, rows, batch.num_tokens)} if squared is not None else {},
        )

    return forward


def value_forward(model: ValueModel) -> Forward:
    """The value of the state before every token with a loss: from the hidden state of the token before it."""

    def forward(batch: Batch, needs: frozenset[str]) -> ModelOutput:
        rows = trained_rows(batch)
        values = model.values(states_before(model.body, batch, rows))
        return ModelOutput(values=_spread(values, rows, batch.num_tokens))

    return forward


def _spread(values: Tensor, rows: Tensor, length: int) -> Tensor:
    """[R] -> [length] float32 (float64 stays): zeros where no row is."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.zeros(length, dtype=wide, device=values.device).index_copy(0, rows, values.to(wide))
