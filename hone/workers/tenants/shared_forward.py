"""One forward and backward for the training commands of several models: the frozen weights are multiplied once for all.

    batches of models --joined--> one row --frozen layer--> y_i + scale_i * B_i (A_i x_i)    at the tokens of model i
                                              '--> the loss of each model --one backward--> gradients of each A_i, B_i

A matrix product over more rows is rounded otherwise, so a model ends with the same figures as alone, and not with the
same bits. Tokens of one model see nothing of another's: they are sequences of their own in the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hone.engines.engine import ScoredStep, on_device
from hone.engines.layout import lay_out
from hone.engines.lora.peft_layers import TRAINED
from hone.models.errors import ModelError
from hone.types import Batch, ModelOutput, Need
from hone.workers.tenants.training import Base, TenantModel
from hone.workers.tenants.work import Work

KEY = "training.share_forwards"
_TRIAL = (3, 5)  # lengths of two sequences: a layer that sees each of them padded is noticed


@dataclass(frozen=True, slots=True)
class _Member:
    """A model that takes part, and the rows of its tokens."""

    layers: Mapping[str, Any]  # path -> PEFT's layer
    rows: Tensor


class SharedForward:
    """The frozen weights of a base model, for several adapters at a time."""

    def __init__(self, base: Base) -> None:
        """Raises ModelError for a model whose layers do not see a batch as one row of tokens."""
        engine: Any = base.frozen()
        self._engine = engine
        self._members: Sequence[_Member] = ()
        self._length = 0  # of the row
        body = self._engine.model.base_model
        name = type(body).__name__
        if base.drops:
            raise ModelError(f"{KEY}: model.use.dropout drops values in each model's own forward; remove one of them")
        if self._engine.experts is not None:
            raise ModelError(f"{KEY}: {name} is a mixture of experts, whose layers see some tokens only; remove it")
        linear = {path: one for path, one in self._engine.model.named_modules() if isinstance(one, nn.Linear | Conv1D)}
        seen: dict[str, int] = {}
        hooks = [one.register_forward_hook(partial(_note_rows, seen, path)) for path, one in linear.items()]
        with torch.no_grad():
            self._engine.forward(_trial(self._engine.device), frozenset())
        for hook in hooks:
            hook.remove()
        for path, rows in seen.items():
            if rows != sum(_TRIAL):
                raise ModelError(f"{KEY}: {path} of {name} does not see a batch as one row of tokens; remove it")
            linear[path].register_forward_hook(partial(self._add_adapters, path))
        self._adaptable = frozenset(seen)

    def train(self, commands: Sequence[tuple[TenantModel, Work]]) -> list[int]:
        """Add the gradients of each model's batch to its own: in one forward, as far as losses need the same of it.

        Returns how many models were in the forward of each command. If it raises, gradients may be incomplete.
        """
        for model, _ in commands:
            if other := sorted(model.layers.keys() - self._adaptable):
                raise RuntimeError(f"{other[0]} has an adapter, and no forward that is shared calls it")
        alike: dict[tuple[frozenset[Need], int], list[tuple[TenantModel, Work]]] = {}
        for model, work in commands:
            alike.setdefault(work.loss.asks, []).append((model, work))
        for group in alike.values():
            if len(group) == 1:
                model, work = group[0]
                model.forward_backward(work.batch, work.loss)
            else:
                self._train_as_one(group)
        return [len(alike[work.loss.asks]) for _, work in commands]

    def _train_as_one(self, commands: Sequence[tuple[TenantModel, Work]]) -> None:
        device = self._engine.device
        batch = on_device(_joined([work.batch for _, work in commands]), device)
        with self._adapting(commands, batch):
            output = self._engine.forward(batch, commands[0][1].loss.needs)
            totals, start = [], 0
            for _, work in commands:
                end = start + work.batch.num_tokens
                part = _part(output, start, end)
                totals.append(ScoredStep(work.loss, None).total(part, on_device(work.batch, device)))
                start = end
            torch.stack(totals).sum().backward()
        for model, _ in commands:
            model.collect()

    @contextmanager
    def _adapting(self, commands: Sequence[tuple[TenantModel, Work]], batch: Batch) -> Iterator[None]:
        """Have the layers add each model's adapter at its tokens."""
        take = lay_out(batch).take  # [R] the batch's token at each place of the row
        ends = torch.tensor([work.batch.num_tokens for _, work in commands]).cumsum(0).to(take.device)
        owner = torch.bucketize(take, ends, right=True)
        self._length = len(take)
        self._members = [
            _Member(model.layers, (owner == number).nonzero()[:, 0]) for number, (model, _) in enumerate(commands)
        ]
        try:
            yield
        finally:
            self._members = ()

    def _add_adapters(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        members = [one for one in self._members if path in one.layers]
        if not members:
            return None
        if inputs[0].shape[-2] != self._length:
            raise RuntimeError(f"{path} sees {inputs[0].shape[-2]} rows of {self._length}")
        rows = torch.cat([one.rows for one in members])
        parts = inputs[0].index_select(-2, rows).split([len(one.rows) for one in members], -2)
        added = []
        for one, part in zip(members, parts, strict=True):
            layer = one.layers[path]
            first, second = layer.lora_A[TRAINED], layer.lora_B[TRAINED]
            added.append(second(first(part.to(first.weight.dtype))) * layer.scaling[TRAINED])
        return output.index_add(-2, rows, torch.cat(added, -2).to(output.dtype))


def _joined(batches: Sequence[Batch]) -> Batch:
    """The sequences of several batches, with what a forward needs of them."""

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(one, name) for one in batches])

    lengths = torch.cat([one.lengths for one in batches])
    starts = accumulate((one.num_sequences for one in batches), initial=0)
    groups = [one.group_index + start for one, start in zip(batches, starts, strict=False)]  # of one model each
    return Batch(
        token_ids=cat("token_ids"),
        position_ids=cat("position_ids"),
        loss_mask=cat("loss_mask"),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        group_index=torch.cat(groups),
        episode_index=torch.arange(len(lengths)),
        ids_at=None if batches[0].ids_at is None else cat("ids_at"),
    )


def _part(output: ModelOutput, start: int, end: int) -> ModelOutput:
    logprobs = output.logprobs
    return ModelOutput(
        logprobs=None if logprobs is None else logprobs[start:end],
        extras={name: one[start:end] for name, one in output.extras.items()},
    )


def _note_rows(seen: dict[str, int], path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
    seen[path] = inputs[0].shape[-2]


def _trial(device: str) -> Batch:
    lengths = torch.tensor(_TRIAL)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    positions = torch.cat([torch.arange(one) for one in _TRIAL])
    number = torch.arange(len(_TRIAL))
    tokens = torch.arange(sum(_TRIAL))
    return on_device(Batch(tokens, positions, positions > 0, ends, number, number.clone()), device)


__all__ = ["SharedForward"]
