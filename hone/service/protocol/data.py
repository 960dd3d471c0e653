"""From the data of a training request to a packed batch, and back.

    tokens [N], targets [N] or [N, K] --pack--> sequences of N + 1 tokens; position i predicts targets[i]
                                       <--split-- log-probs [N] or [N, K] of each datum

Where the targets are the tokens that follow, as usual, the batch has them as its tokens. Other targets, such as the K
tokens of a teacher, are looked up in the same distribution (`Batch.ids_at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hone.algorithms.summed_losses import HIGH, LOW
from hone.data.packing import Sample, pack_samples
from hone.service.protocol.losses import ROW, RequestLoss, rule_of, settings_of
from hone.service.protocol.refusals import BadRequest
from hone.service.protocol.wire import Datum, TrainingRequest
from hone.types import Batch

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class Work:
    """A training request, ready for an engine."""

    batch: Batch
    loss: RequestLoss
    lengths: tuple[int, ...]  # N of each datum
    widths: tuple[int, ...]  # K of each datum; 0: its targets are [N]

    def split(self) -> list[NDArray[np.float32]]:
        """The log-probs of each datum, once the loss has been called with all of its tokens."""
        found, start = [], 0
        for length, width in zip(self.lengths, self.widths, strict=True):
            part = self.loss.logprobs[start + 1 : start + 1 + length].numpy()
            part = part.reshape(length, -1)[:, :width] if width else part.reshape(length, -1)[:, 0]
            found.append(np.ascontiguousarray(part))
            start += length + 1
        return found


def pack_request(request: TrainingRequest, vocabulary: int, longest: int) -> Work:
    """Check and pack a request. Raises BadRequest naming the datum and the input that is wrong.

    `longest`: tokens of a sequence that the engine can take, the last target included.
    """
    rule, settings = rule_of(request.loss), settings_of(request.loss, request.settings)
    targets = [
        _checked(datum, f"data[{number}]", request.loss, vocabulary) for number, datum in enumerate(request.data)
    ]
    for number, datum in enumerate(request.data):
        if len(datum.tokens) >= longest:
            raise BadRequest(f"data[{number}] has {len(datum.tokens)} tokens; at most {longest - 1} are trained here")
    width = _width(request.data, targets)
    samples = [
        Sample((*datum.tokens.tolist(), int(target[-1].flat[0])), (0, *([1] * len(datum.tokens))))
        for datum, target in zip(request.data, targets, strict=True)
    ]
    batch = pack_samples(samples)
    extras = {name: _column(request.data, name, settings, width) for name in (*rule.needs, *rule.takes)}
    extras[ROW] = torch.arange(batch.num_tokens)
    batch = batch.with_(loss_weights=torch.ones(batch.num_tokens), extras=extras)
    if width:
        batch = batch.with_(ids_at=torch.from_numpy(_spread(targets, width, np.int64)))
    loss = RequestLoss(request.loss, settings, batch.num_tokens, width)
    widths = tuple(target.shape[1] if target.ndim == 2 else 0 for target in targets)
    return Work(batch, loss, tuple(len(datum.tokens) for datum in request.data), widths)


def _checked(datum: Datum, where: str, loss: str, vocabulary: int) -> NDArray[np.int64]:
    """The targets of a datum whose inputs fit its loss."""
    rule, inputs, length = rule_of(loss), datum.inputs, len(datum.tokens)
    known = {TARGETS, *rule.needs, *rule.takes}
    if missing := [name for name in (TARGETS, *rule.needs) if name not in inputs]:
        raise BadRequest(f"{where}.loss_fn_inputs lacks {missing[0]}, which {loss} needs")
    if other := sorted(inputs.keys() - known):
        raise BadRequest(f"{where}.loss_fn_inputs has {other[0]}, which {loss} does not use; it takes {sorted(known)}")
    targets = inputs[TARGETS]
    wide = targets.ndim == 2 and loss == "cross_entropy" and targets.shape[1] > 0
    if targets.dtype.kind != "i" or not (targets.ndim == 1 or wide) or len(targets) != length:
        allowed = f"[{length}]" + (f" or [{length}, K]" if loss == "cross_entropy" else "")
        raise BadRequest(f"{where}: target_tokens of {loss} should be int64 {allowed}, found {list(targets.shape)}")
    for name, array in inputs.items():
        if name != TARGETS and array.shape != targets.shape:
            raise BadRequest(f"{where}: {name} has the shape {list(array.shape)}, target_tokens {list(targets.shape)}")
        if name != TARGETS and not np.isfinite(array).all():
            raise BadRequest(f"{where}: {name} has a value that is not finite")
    for name, ids in (("model_input", datum.tokens), (TARGETS, targets)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            odd = ids[(ids < 0) | (ids >= vocabulary)].flat[0]
            raise BadRequest(f"{where}: {name} has the token {odd}; ids are from 0 to {vocabulary - 1}")
    return targets.astype(np.int64)


def _width(data: Sequence[Datum], targets: Sequence[NDArray[np.int64]]) -> int:
    """Targets of each position in the packed batch; 0: the next tokens are the targets."""
    if all(
        one.ndim == 1 and np.array_equal(one[:-1], datum.tokens[1:]) for datum, one in zip(data, targets, strict=True)
    ):
        return 0
    return max(one.shape[1] if one.ndim == 2 else 1 for one in targets)


def _column(data: Sequence[Datum], name: str, settings: dict[str, float], width: int) -> torch.Tensor:
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
