"""A micro-batch as Megatron's layers want it: this rank's tokens, their rotary angles, and the packing of the row.

    batch --lay_out--> row, prefixes once --fillers--> a length that the ranks can share --slice--> this rank's tokens

Fillers are sequences of their own at the end of the row: no token of the batch sees them, and they have no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.engines.forward import Copies, scored_rows
from hone.engines.layout import Layout, lay_out
from hone.engines.rebuilt.configs import fixed_rotary, head_size
from hone.models.attention.packed import Packing, Run
from hone.models.attention.sequence_parallel import shared_by
from hone.models.errors import ModelError
from hone.types import Batch
from hone_megatron.mesh import MegatronRanks
from hone_megatron.modules.attention import PackedRow


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch on one rank."""

    token_ids: Tensor  # [T_i] of this context rank
    angles: Tensor  # [T_i, 1, 1, d] rotary
    packed: PackedRow
    rows: Tensor  # [R] the tokens of the batch that this context rank scores
    where: Tensor  # [R] the hidden state before each, among this context rank's
    copies: Copies
    layout: Layout  # the complete row with its fillers; `packing.ranks` are those that have slices of it in a layer


class Rows:
    """Lays out micro-batches for one engine."""

    def __init__(
        self,
        skeleton: Any,
        ranks: MegatronRanks,
        name: str,
        device: str,
        length: int | None = None,
        lay: Callable[[Packing, float], PackedRow] = PackedRow,
    ) -> None:
        """`skeleton` is the transformers model on the meta device; with `length`, all rows have as many tokens.

        `lay` makes what attention gets of a row, from its packing and the scale of rotary parts.

        Raises ModelError for rotary positions that depend on the length of a batch.
        """
        frequencies, self._scale = fixed_rotary(skeleton, name, "megatron")
        self._frequencies = frequencies.to(device)
        partial = 2 * len(frequencies) != head_size(skeleton.config)
        if self._scale != 1 and partial and not hasattr(skeleton.config, "kv_lora_rank"):
            raise ModelError(
                f"{name} scales the rotary part of its heads alone (type {skeleton.rotary_emb.rope_type!r}), which the "
                "megatron engine computes for latent attention only; use backend fsdp2"
            )
        self._ranks = ranks
        self._length = length
        self._lay = lay

    def lay(self, batch: Batch) -> Row:
        """Build this rank's row of a micro-batch."""
        with shared_by(self._ranks.context):
            layout = lay_out(batch)
        tokens, positions, packing, take = layout.token_ids, layout.position_ids, layout.packing, layout.take
        missing = -len(tokens) % self._ranks.token_ranks if self._length is None else self._length - len(tokens)
        if missing:
            tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
            packing, take = _with_fillers(packing, missing), F.pad(take, (0, missing))
        complete = replace(layout, token_ids=tokens, position_ids=positions, take=take)
        complete = replace(complete, packing=replace(packing, ranks=self._ranks.tokens))
        context = self._ranks.context
        rows, where, copies = scored_rows(batch, complete, context)
        if context is not None:
            tokens, positions = context.own(tokens), context.own(positions)
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)[:, None, None]
        return Row(tokens, angles, self._lay(packing, self._scale), rows, where, copies, complete)


def _with_fillers(packing: Packing, count: int) -> Packing:
    ends = torch.cat([packing.cu_seqlens, packing.cu_seqlens[-1:] + count])
    return replace(packing, cu_seqlens=ends, lengths=(*packing.lengths, count), runs=(*packing.runs, Run(1, count)))
