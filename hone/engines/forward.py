"""Forward of one micro-batch, packed tokens to `ModelOutput`, for language and value models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hone.engines.layout import Layout, lay_out, on_host
from hone.engines.logprobs import Head, Queries, Reference, score_tokens
from hone.engines.moe import Experts
from hone.models.attention.packed import packed
from hone.models.attention.sequence_parallel import SequenceRanks, current_ranks
from hone.models.loading import ValueModel
from hone.models.vision.model import hidden_states
from hone.types import Batch, ModelOutput, Need, TopK

Forward = Callable[[Batch, frozenset[Need]], ModelOutput]
Copies = tuple[Tensor, Tensor] | None  # tokens, and for each the scored one that it is equal to; None: all are scored

EXTRAS = ("sum_pi_squared", "logprobs_at", "full_kl", "top_k_ids", "top_k_logprobs")  # fields of TokenScores


def trained_rows(batch: Batch) -> Tensor:
    """Indices of the tokens with a loss, [R], in host memory. Raises ValueError if a sequence's first token has one."""
    known = on_host(batch)
    if known.num_sequences and bool(known.loss_mask[known.cu_seqlens[:-1]].any()):
        raise ValueError("loss_mask is 1 on the first token of a sequence, which has no log-prob")
    return known.loss_mask.nonzero()[:, 0]


def scored_rows(batch: Batch, layout: Layout, ranks: SequenceRanks | None) -> tuple[Tensor, Tensor, Copies]:
    """Find the tokens that this rank scores: those with a loss; tokens that share a place in the row are scored once.

    The first token at a place is scored, with a loss or without. Returns the scored tokens [R], the place of the hidden
    state before each among this rank's [R], and which tokens get whose score. `ranks` have slices of the row.
    """
    trained, device = trained_rows(batch), batch.token_ids.device
    rows, copies = trained, None
    if batch.ids_at is None and batch.reference_states is None:  # which may differ between equal tokens
        first = layout.first[trained]
        rows = first.unique()
        if not torch.equal(rows, trained):
            copies = trained.to(device, non_blocking=True), first.to(device, non_blocking=True)
    rows = rows.to(device, non_blocking=True)
    where = layout.where[rows - 1]
    if ranks is None:
        return rows, where, copies
    where = where - ranks.start(len(layout.token_ids))
    here = (where >= 0) & (where < ranks.slices(len(layout.token_ids))[ranks.rank])
    return rows[here], where[here], copies


@dataclass(frozen=True, slots=True)
class States:
    """A body's results for the tokens that are scored."""

    rows: Tensor  # [R] these tokens
    hidden: Tensor  # [R, H] the last hidden state before each
    copies: Copies
    extras: dict[str, Tensor]  # the routers' outputs, [T, ...]


def states_before(body: Any, batch: Batch, experts: Experts | None, needs: frozenset[Need]) -> States:
    """Run the body and return its last hidden state before each token with a loss.

    Under sequence parallelism, each rank has the states of its slice only.
    """
    layout = lay_out(batch)
    token_ids, position_ids, images = layout.token_ids, layout.position_ids, layout.images
    ranks = layout.packing.ranks
    rows, where, copies = scored_rows(batch, layout, ranks)
    if ranks is not None:
        if images is not None:
            images = images.within(ranks.start(len(token_ids)), len(ranks.own(token_ids)))
        token_ids, position_ids = ranks.own(token_ids), ranks.own(position_ids)
    extras: dict[str, Tensor] = {}
    with packed(layout.packing), nullcontext() if experts is None else experts.watch(batch, layout) as routing:
        states = hidden_states(body, token_ids, position_ids, images)
    if experts is not None and routing is not None:
        extras = experts.outputs(batch, layout, routing, needs)
    return States(rows, states.index_select(0, where), copies, extras)


def language_forward(
    model: Any,
    temperature: float,
    chunk_tokens: int,
    reference_head: Callable[[], Head] | None = None,
    experts: Experts | None = None,
    head_dtype: torch.dtype | None = None,
) -> Forward:
    """Make the forward of a language model: log-probs of every token with a loss, and the outputs named in `needs`.

    `head_dtype` is the dtype that hidden states and head are multiplied in; None: their own.

    "entropy" is a field of `ModelOutput`; the others are in its `extras`: "sum_pi_squared"; "states" (the hidden state
    that predicts the token, [T, H] in the dtype of the computation); `TopK` (as "top_k_ids" and "top_k_logprobs",
    [T, K]); "logprobs_at" (of the tokens `batch.ids_at` [T, K]); "full_kl" (to the model with the states
    `batch.reference_states` and the head `reference_head()`); with `experts`, "routed_experts" (of every
    token, [T, layers, top_k]) and the entries of `Experts.needs`.
    """

    score = Scorer(temperature, chunk_tokens, reference_head)

    def forward(batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        found = states_before(model.base_model, batch, experts, needs)
        return score(found, replace(Head.of(model), dtype=head_dtype), batch, needs)

    return forward


@dataclass(frozen=True, slots=True)
class Scorer:
    """From hidden states to the outputs of a language model (see `language_forward`)."""

    temperature: float
    chunk_tokens: int
    reference_head: Callable[[], Head] | None = None

    def __call__(self, found: States, head: Head, batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        rows, length = found.rows, batch.num_tokens
        scores = score_tokens(
            found.hidden,
            batch.token_ids[rows],
            head,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            needs=needs,
            queries=_queries(batch, rows, needs, self.reference_head),
        )
        extras = {name: getattr(scores, name) for name in EXTRAS}
        if "states" in needs:
            extras["states"] = found.hidden
        return ModelOutput(
            logprobs=_spread(found, scores.logprobs, length),
            entropy=_spread(found, scores.entropy, length) if scores.entropy is not None else None,
            extras=found.extras
            | {name: _spread(found, value, length) for name, value in extras.items() if value is not None},
        )


def _queries(
    batch: Batch, rows: Tensor, needs: frozenset[Need], reference_head: Callable[[], Head] | None
) -> Queries | None:
    """Translate `needs` into `Queries`. Raises ValueError if the batch or the engine lacks an input for them."""
    top_k = max((need.count for need in needs if isinstance(need, TopK)), default=0)
    at, full = "logprobs_at" in needs, "full_kl" in needs
    if not (at or full or top_k):
        return None
    ids, states = batch.ids_at if at else None, batch.reference_states if full else None
    for needed, name, value in ((at, "ids_at", ids), (full, "reference_states", states)):
        if needed and value is None:
            raise ValueError(f"Batch.{name} is missing, and the loss needs {sorted(map(str, needs))} of the forward")
    if full and reference_head is None:
        raise ValueError("full_kl needs the reference's head, and this engine was given no reference model")
    reference = None
    if states is not None and reference_head is not None:
        reference = Reference(states[rows], reference_head())
    return Queries(None if ids is None else ids[rows], top_k, reference)


def value_forward(model: ValueModel, experts: Experts | None = None) -> Forward:
    """Make the forward of a value model: for every token with a loss, the value at the token before it."""

    def forward(batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        found = states_before(model.body, batch, experts, needs)
        return value_output(found, model.values(found.hidden), batch)

    return forward


def value_output(found: States, values: Tensor, batch: Batch) -> ModelOutput:
    """The output of a value model with `values` [R] of the states that were found."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return ModelOutput(values=_spread(found, values, batch.num_tokens), extras=found.extras)


def _spread(found: States, values: Tensor, length: int) -> Tensor:
    """Put rows at their tokens, [R, ...] -> [length, ...], zeros elsewhere; sums over ranks that share the rows."""
    spread = values.new_zeros(length, *values.shape[1:])
    whole = spread.index_copy(0, found.rows, values)
    if (ranks := current_ranks()) is not None:
        whole = ranks.whole(whole)
    return whole if found.copies is None else spread.index_copy(0, found.copies[0], whole[found.copies[1]])
