"""Micro-batches through the stages of a pipeline, by Megatron-Core's schedules (1F1B, or interleaved virtual stages).

    stage 0      tokens -> embedding, layers --hidden states-->  stage 1 ... --> last stage: layers, head, loss
                 gradients <------------------------------------------------- backward

Every stage has the same micro-batches: each lays out rows for its own attention. Only the last stage has outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from hone.types import Batch
from hone_megatron.rows import Row, Rows

RunFn = Callable[[int, Row, Batch], tuple[Tensor, dict[str, Tensor]]]
"""Number of a part of this rank -> the hidden states that it makes of a micro-batch, and outputs [T, ...] of it."""

FinishFn = Callable[[Tensor, dict[str, Tensor], Row, Batch], Any]
"""What the last stage makes of its hidden states and outputs: the loss to call backward on, or `ModelOutput`."""


class Pipeline:
    """The parts of the model on this rank's stage, run together with the other stages."""

    def __init__(self, parts: Sequence[nn.Module], rows: Rows, length: int) -> None:
        """`parts` in the order of their layers; `length` is the number of tokens of a row if all rows are alike."""
        self._parts = list(parts)
        self._rows = rows
        self._length = length

    def run(self, batches: Sequence[Batch], forward: RunFn, finish: FinishFn, backward: bool) -> list[Any]:
        """Run a forward of every micro-batch, and with `backward` its backward. Every stage calls it.

        Returns what `finish` made of each micro-batch, on the last stage; nothing on the others. With `backward`,
        `finish` returns the loss.
        """

        def step(batches: Iterator[Batch], part: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            row = self._rows.lay(batch)
            number = next(number for number, one in enumerate(self._parts) if one is part)
            hidden, outputs = forward(number, row, batch)
            if backward and not hidden.requires_grad:  # a first stage without a trained weight: backward ends here
                hidden = hidden.detach().requires_grad_()

            def last(hidden: Tensor, non_loss_data: bool = False) -> Any:
                found = finish(hidden, outputs, row, batch)
                return found if non_loss_data else (found, found.new_zeros(()).int(), None)

            return hidden, last

        several = len(self._parts) > 1
        iterators = [iter(batches) for _ in self._parts]
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=self._parts if several else self._parts[0],
            num_microbatches=len(batches),
            seq_length=self._length,
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
        return found
