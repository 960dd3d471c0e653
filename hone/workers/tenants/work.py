"""The data of a training command as a packed batch with its loss, and back.

    tokens [N], targets [N] or [N, K] --work_of--> sequences of N + 1 tokens; position i predicts targets[i]
                                      <--split---- log-probs [N] or [N, K] of each datum

Where the targets are the tokens that follow, as usual, the batch has them as its tokens. Other targets, such as the K
tokens of a teacher, are looked up in the same distribution (`Batch.ids_at`). Sequences that begin alike, such as
answers to one prompt, are a group of the batch, so that an engine computes their beginning once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hone.algorithms.summed_losses import HIGH, LOSSES, LOW
from hone.data.packing import SHORTEST_SHARED, Sample, pack_samples
from hone.types import Batch, LossOutput, ModelOutput, Need

TARGETS = "target_tokens"
ROW = "command_row"  # extra of a batch: the number of each token in the command
AT = "logprobs_at"  # of an engine's forward: log-probs of `Batch.ids_at`
LARGEST_GROUP = 64  # sequences that share their beginning
GROUP_TOKENS = 2_048  # beyond the beginning that they share: an engine takes a group at once, and has to have room


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence and the inputs of its loss."""

    tokens: NDArray[np.int64]  # [N]
    inputs: Mapping[str, NDArray[Any]]  # [N] or [N, K], float32 or int64


class CommandLoss:
    """The loss of one command. It keeps the log-probs and losses of the tokens that an engine calls it with."""

    def __init__(self, name: str, settings: Mapping[str, float], rows: int, width: int) -> None:
        """`rows`: tokens of the command's batch; `width`: targets of each, 0: the next token of the sequence."""
        self._formula, self._settings, self.width = LOSSES[name].formula, settings, width
        self.zero_without_advantage = bool(LOSSES[name].factor)  # an engine asks for it: such sequences are not trained
        self.needs: frozenset[Need] = frozenset({AT} if width else ())
        self.logprobs = torch.zeros(rows, width) if width > 1 else torch.zeros(rows)
        self._losses = torch.zeros(rows, dtype=torch.float64)

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        logprobs = output.extras[AT] if self.width else output.logprobs
        assert logprobs is not None
        logprobs = logprobs[:, 0] if self.width == 1 else logprobs
        values = self._formula(logprobs, batch, self._settings)
        values = values.sum(1) if self.width > 1 else values
        rows = batch.extras[ROW]
        with torch.no_grad():
            self.logprobs.index_copy_(0, rows.cpu(), logprobs.detach().float().cpu())
            self._losses.index_copy_(0, rows.cpu(), torch.where(batch.loss_mask, values.detach(), 0.0).double().cpu())
        return LossOutput(values)

    @property
    def asks(self) -> tuple[frozenset[Need], int]:
        """Return what it needs of a forward; losses that ask for the same can share one."""
        return self.needs, self.width

    @property
    def sum(self) -> float:
        return float(self._losses.sum())


@dataclass(frozen=True, slots=True)
class Work:
    """A training command, ready for an engine."""

    batch: Batch
    loss: CommandLoss
    lengths: tuple[int, ...]  # N of each datum
    widths: tuple[int, ...]  # K of each datum; 0: its targets are [N]
    forward_only: bool = False

    def split(self) -> list[NDArray[np.float32]]:
        """The log-probs of each datum, once the loss has been called with all of its tokens."""
        found, start = [], 0
        for length, width in zip(self.lengths, self.widths, strict=True):
            part = self.loss.logprobs[start + 1 : start + 1 + length].numpy()
            part = part.reshape(length, -1)[:, :width] if width else part.reshape(length, -1)[:, 0]
            found.append(np.ascontiguousarray(part))
            start += length + 1
        return found


def work_of(loss: str, settings: Mapping[str, float], data: Sequence[Datum], forward_only: bool = False) -> Work:
    """Pack data whose inputs fit the loss, a name in `LOSSES` with all of its settings."""
    rule, targets = LOSSES[loss], [datum.inputs[TARGETS] for datum in data]
    width = _width(data, targets)
    samples = [
        Sample((*datum.tokens.tolist(), int(target[-1].flat[0])), (0, *([1] * len(datum.tokens))))
        for datum, target in zip(data, targets, strict=True)
    ]
    batch = pack_samples(samples).with_(group_index=beginning_alike([one.token_ids for one in samples]))
    extras = {name: _column(data, name, settings, width) for name in (*rule.needs, *rule.takes)}
    extras[ROW] = torch.arange(batch.num_tokens)
    batch = batch.with_(loss_weights=torch.ones(batch.num_tokens), extras=extras)
    if rule.factor:
        batch = batch.with_(advantages=extras[rule.factor].view(batch.num_tokens, -1).abs().sum(1))
    if width:
        batch = batch.with_(ids_at=torch.from_numpy(_spread(targets, width, np.int64)))
    widths = tuple(target.shape[1] if target.ndim == 2 else 0 for target in targets)
    lengths = tuple(len(datum.tokens) for datum in data)
    return Work(batch, CommandLoss(loss, settings, batch.num_tokens, width), lengths, widths, forward_only)


def beginning_alike(sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Number groups of sequences whose common beginnings are as many tokens as possible, [N] int64.

    >>> beginning_alike([(1, 2, 3, 4, 5), (5, 6), (1, 2, 3, 4, 7)]).tolist()
    [0, 1, 0]
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)  # those that begin alike are neighbours
    common = [0, *(_shared_beginning(sequences[one], sequences[other]) for one, other in pairwise(order))]
    saved, begin = [0], [0]  # of the first sequences in this order: tokens, and where the last group begins
    for end in range(1, len(order) + 1):
        best, start, alike = saved[-1], end - 1, len(sequences[order[end - 1]])
        tokens = alike
        for first in range(end - 1, max(end - LARGEST_GROUP, 0), -1):
            alike, tokens = min(alike, common[first]), tokens + len(sequences[order[first - 1]])
            if alike < SHORTEST_SHARED or tokens - alike * (end - first + 1) > GROUP_TOKENS:
                break
            if (found := saved[first - 1] + alike * (end - first)) > best:
                best, start = found, first - 1
        saved.append(best)
        begin.append(start)
    groups, end = torch.zeros(len(order), dtype=torch.int64), len(order)
    while end:
        groups[order[begin[end] : end]] = min(order[begin[end] : end])
        end = begin[end]
    return groups


def _shared_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens at the beginning of both."""
    shortest = min(len(one), len(other))
    differ = np.asarray(one[:shortest]) != np.asarray(other[:shortest])
    return int(differ.argmax()) if differ.any() else shortest


def _width(data: Sequence[Datum], targets: Sequence[NDArray[np.int64]]) -> int:
    """Targets of each position in the packed batch; 0: the next tokens are the targets."""
    if all(
        one.ndim == 1 and np.array_equal(one[:-1], datum.tokens[1:]) for datum, one in zip(data, targets, strict=True)
    ):
        return 0
    return max(one.shape[1] if one.ndim == 2 else 1 for one in targets)


def _column(data: Sequence[Datum], name: str, settings: Mapping[str, float], width: int) -> torch.Tensor:
    """An input of the loss for every token of the batch, [T] or [T, K]; what a datum lacks has its default."""
    default = settings[name] if name in (LOW, HIGH) else 1.0
    given = [datum.inputs.get(name, np.full(datum.inputs[TARGETS].shape, default, np.float32)) for datum in data]
    found = torch.from_numpy(_spread(given, max(width, 1), np.float32))
    return found if width > 1 else found[:, 0].contiguous()


def _spread(rows: Sequence[NDArray[Any]], width: int, dtype: type[np.generic]) -> NDArray[Any]:
    """[T, width]: one row for each token of the batch; the first token of a sequence, and missing columns, have 0."""
    found = np.zeros((sum(len(one) + 1 for one in rows), width), dtype)
    start = 0
    for one in rows:
        part = one.reshape(len(one), -1)
        found[start + 1 : start + 1 + len(one), : part.shape[1]] = part
        start += len(one) + 1
    return found


__all__ = ["TARGETS", "CommandLoss", "Datum", "Work", "beginning_alike", "work_of"]
