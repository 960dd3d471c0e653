"""One forward of one micro-batch: packed tokens in, `ModelOutput` out, for both model types."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hone.engines.layout import lay_out
from hone.engines.logprobs import Beside, Head, Reference, score_tokens
from hone.engines.moe import Experts
from hone.models.attention import packed
from hone.models.loading import DTYPES, ValueModel, load_language_model
from hone.models.sequence_parallel import current_ranks
from hone.models.settings import ModelConfig
from hone.models.vision import hidden_states
from hone.types import Batch, ModelOutput

Forward = Callable[[Batch, frozenset[str]], ModelOutput]

TOP_K = "top_k:"  # a need that carries a number: "top_k:8"
EXTRAS = ("sum_pi_squared", "logprobs_at", "full_kl", "top_k_ids", "top_k_logprobs")  # fields of TokenScores


def trained_rows(batch: Batch) -> Tensor:
    """Indices of the tokens with a loss, [R]. Raises ValueError if a first token is one: nothing predicts it."""
    if batch.num_sequences and bool(batch.loss_mask[batch.cu_seqlens[:-1]].any()):
        raise ValueError("loss_mask is 1 on the first token of a sequence, which has no log-prob")
    return batch.loss_mask.nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class States:
    """What a body gives for some tokens."""

    rows: Tensor  # [R] those of the tokens that are here
    hidden: Tensor  # [R, H] the last hidden state before each
    extras: dict[str, Tensor]  # what is needed of the routers, [T, ...]


def states_before(body: Any, batch: Batch, rows: Tensor, experts: Experts | None, needs: frozenset[str]) -> States:
    """The body's last hidden state before each of the tokens `rows`.

    All are here unless ranks share the row (`sequence_parallel`); then each has the states of its slice.
    """
    layout = lay_out(batch)
    token_ids, position_ids, where = layout.token_ids, layout.position_ids, layout.where[rows - 1]
    images, ranks = layout.images, layout.packing.ranks
    if ranks is not None:
        where = where - ranks.start(len(token_ids))
        if images is not None:
            images = images.within(ranks.start(len(token_ids)), len(ranks.own(token_ids)))
        token_ids, position_ids = ranks.own(token_ids), ranks.own(position_ids)
        here = (where >= 0) & (where < len(token_ids))
        rows, where = rows[here], where[here]
    extras: dict[str, Tensor] = {}
    with packed(layout.packing), nullcontext() if experts is None else experts.watch(batch, layout) as routing:
        states = hidden_states(body, token_ids, position_ids, images)
    if experts is not None and routing is not None:
        extras = experts.outputs(batch, layout, routing, needs)
    return States(rows, states.index_select(0, where), extras)


def language_forward(
    model: Any,
    temperature: float,
    chunk_tokens: int,
    reference_head: Callable[[], Head] | None = None,
    experts: Experts | None = None,
) -> Forward:
    """Log-probs of every token with a loss, and what else is needed of its distribution.

    needs, each an output of `ModelOutput`: "entropy"; in `extras` "sum_pi_squared", "states" (the hidden state that
    predicts the token, [T, H] in the dtype of the computation), "top_k:K" (as "top_k_ids" and "top_k_logprobs",
    [T, K]), "logprobs_at" (of the tokens that `batch.extras["ids_at"]` [T, K] names) and "full_kl" (to the model whose
    "states" are `batch.extras["reference_states"]` and whose head `reference_head` gives). Of a mixture of `experts`,
    "routed_experts" ([T, layers, top_k], of every token), and what `Experts.needs` has.
    """

    def forward(batch: Batch, needs: frozenset[str]) -> ModelOutput:
        found = states_before(model.base_model, batch, trained_rows(batch), experts, needs)
        rows, hidden = found.rows, found.hidden
        scores = score_tokens(
            hidden,
            batch.token_ids[rows],
            Head.of(model),
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            needs=needs,
            beside=_beside(batch, rows, needs, reference_head),
        )
        extras = {name: getattr(scores, name) for name in EXTRAS}
        if "states" in needs:
            extras["states"] = hidden
        length = batch.num_tokens
        return ModelOutput(
            logprobs=_spread(scores.logprobs, rows, length),
            entropy=_spread(scores.entropy, rows, length) if scores.entropy is not None else None,
            extras=found.extras
            | {name: _spread(value, rows, length) for name, value in extras.items() if value is not None},
        )

    return forward


def _beside(
    batch: Batch, rows: Tensor, needs: frozenset[str], reference_head: Callable[[], Head] | None
) -> Beside | None:
    """What `needs` asks beyond the tokens themselves. Raises ValueError if the batch or the engine lacks its input."""
    top_k = max((int(need.removeprefix(TOP_K)) for need in needs if need.startswith(TOP_K)), default=0)
    at, full = "logprobs_at" in needs, "full_kl" in needs
    if not (at or full or top_k):
        return None
    for needed, name in ((at, "ids_at"), (full, "reference_states")):
        if needed and name not in batch.extras:
            raise ValueError(f"Batch.extras[{name!r}] is missing, and the loss needs {sorted(needs)} of the forward")
    if full and reference_head is None:
        raise ValueError("full_kl needs the reference's head, and this engine was given no reference model")
    reference = None
    if full and reference_head is not None:
        reference = Reference(batch.extras["reference_states"][rows], reference_head())
    return Beside(batch.extras["ids_at"][rows] if at else None, top_k, reference)


def head_of_reference(model: ModelConfig, compute_dtype: str, device: str) -> Callable[[], Head]:
    """Loads a model's head when it is first asked for, and keeps only that: what "full_kl" compares with.

    The reference itself runs elsewhere and gives its "states"; it never changes, so its head is read once.
    """

    @cache
    def load() -> Head:
        head = Head.of(load_language_model(model))
        dtype = DTYPES[compute_dtype]
        bias = head.bias.detach().to(device, dtype) if head.bias is not None else None
        return replace(head, weight=head.weight.detach().to(device, dtype).clone(), bias=bias)

    return load


def value_forward(model: ValueModel, experts: Experts | None = None) -> Forward:
    """The value of the state before every token with a loss: from the hidden state of the token before it."""

    def forward(batch: Batch, needs: frozenset[str]) -> ModelOutput:
        found = states_before(model.body, batch, trained_rows(batch), experts, needs)
        values = model.values(found.hidden)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return ModelOutput(values=_spread(values, found.rows, batch.num_tokens), extras=found.extras)

    return forward


def _spread(values: Tensor, rows: Tensor, length: int) -> Tensor:
    """[R, ...] -> [length, ...], in the same dtype: zeros where no row is. Ranks that share rows get those of all."""
    spread = values.new_zeros(length, *values.shape[1:]).index_copy(0, rows, values)
    ranks = current_ranks()
    return spread if ranks is None else ranks.whole(spread)
