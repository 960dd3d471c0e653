"""A micro-batch as Megatron's layers want it: this rank's tokens, their rotary angles, and the packing of the row.

    batch --lay_out--> row, prefixes once --fillers--> a length that the ranks can share --slice--> this rank's tokens

Fillers are sequences of their own at the end of the row: no token of the batch sees them, and they have no loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.engines.forward import trained_rows
from hone.engines.layout import lay_out
from hone.engines.megatron.mesh import MegatronRanks
from hone.engines.megatron.model import PackedRow
from hone.models.attention.packed import Packing, Run
from hone.models.attention.sequence_parallel import shared_by
from hone.models.errors import ModelError
from hone.models.rotary import CHANGING
from hone.types import Batch


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch on one rank."""

    token_ids: Tensor  # [T_i] of this context rank
    angles: Tensor  # [T_i, 1, 1, d] rotary
    packed: PackedRow
    rows: Tensor  # [R] the tokens of the batch that this context rank scores
    where: Tensor  # [R] the hidden state before each, among this context rank's


class Rows:
    """Lays out micro-batches for one engine."""

    def __init__(self, skeleton: Any, ranks: MegatronRanks, name: str, device: str, length: int | None = None) -> None:
        """`skeleton` is the transformers model on the meta device; with `length`, all rows have as many tokens.

        Raises ModelError for rotary positions that depend on the length of a batch.
        """
        rotary = type(skeleton.rotary_emb)(skeleton.config)
        if rotary.rope_type in CHANGING:
            raise ModelError(
                f"{name} has rotary positions of type {rotary.rope_type!r}, which the megatron engine does not have; "
                "use backend fsdp2"
            )
        self._frequencies = rotary.inv_freq.to(device, torch.float32)
        self._scale = float(rotary.attention_scaling) ** 2  # of queries and of keys
        self._ranks = ranks
        self._length = length

    def lay(self, batch: Batch) -> Row:
        """Build this rank's row of a micro-batch."""
        with shared_by(self._ranks.context):
            layout = lay_out(batch)
        tokens, positions, packing = layout.token_ids, layout.position_ids, layout.packing
        missing = -len(tokens) % self._ranks.token_ranks if self._length is None else self._length - len(tokens)
        if missing:
            tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
            packing = _with_fillers(packing, missing)
        rows = trained_rows(batch)
        where = layout.where[rows - 1]
        context = self._ranks.context
        if context is not None:
            where = where - context.start(len(tokens))
            tokens, positions = context.own(tokens), context.own(positions)
            here = (where >= 0) & (where < len(tokens))
            rows, where = rows[here], where[here]
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)[:, None, None]
        return Row(tokens, angles, PackedRow(packing, self._scale), rows, where)


def _with_fillers(packing: Packing, count: int) -> Packing:
    ends = torch.cat([packing.cu_seqlens, packing.cu_seqlens[-1:] + count])
    return replace(packing, cu_seqlens=ends, lengths=(*packing.lengths, count), runs=(*packing.runs, Run(1, count)))
