"""The losses of a request: by name, with their settings, as a callable for a training engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hone.algorithms.summed_losses import LOSSES, LossRule
from hone.registry import unknown
from hone.service.protocol.refusals import BadRequest
from hone.types import Batch, LossOutput, ModelOutput, Need

ROW = "service_row"  # extra of a batch: the number of each token in the request
AT = "logprobs_at"  # of an engine's forward: log-probs of `Batch.ids_at`
NOT_SERVED = {
    "stable_reinforce": "choose importance_sampling or cispo (in the cookbook: loss_fn=importance_sampling)",
    "custom": "custom losses on the server are not; forward_backward_custom computes them in the client",
}


def rule_of(name: str) -> LossRule:
    """The loss of a name. Raises BadRequest with what there is."""
    if name in NOT_SERVED:
        raise BadRequest(f"loss_fn={name} is not served here: {NOT_SERVED[name]}")
    if name not in LOSSES:
        raise BadRequest(unknown("loss_fn", name, list(LOSSES)))
    return LOSSES[name]


def settings_of(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """All settings of a loss. Raises BadRequest for one that it does not have, or a text."""
    known = rule_of(name).settings
    found = dict(known)
    for key, value in given.items():
        if key not in known:
            raise BadRequest(f"loss_fn_config of {name}: " + unknown("setting", key, list(known)))
        if not isinstance(value, int | float):
            raise BadRequest(f"loss_fn_config of {name}: {key} should be a number, found {value!r:.60}")
        found[key] = float(value)
    return found


class RequestLoss:
    """The loss of one request. It keeps the log-probs and losses of the tokens that an engine calls it with."""

    def __init__(self, name: str, settings: Mapping[str, float], rows: int, width: int) -> None:
        """`rows`: tokens of the request's batch; `width`: targets of each, 0: the next token of the sequence."""
        self._formula, self._settings, self._width = rule_of(name).formula, settings, width
        self.needs: frozenset[Need] = frozenset({AT} if width else ())
        self.logprobs = torch.zeros(rows, width) if width > 1 else torch.zeros(rows)
        self._losses = torch.zeros(rows, dtype=torch.float64)

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        logprobs = output.extras[AT] if self._width else output.logprobs
        assert logprobs is not None
        logprobs = logprobs[:, 0] if self._width == 1 else logprobs
        values = self._formula(logprobs, batch, self._settings)
        values = values.sum(1) if self._width > 1 else values
        rows = batch.extras[ROW]
        with torch.no_grad():
            self.logprobs.index_copy_(0, rows.cpu(), logprobs.detach().float().cpu())
            self._losses.index_copy_(0, rows.cpu(), torch.where(batch.loss_mask, values.detach(), 0.0).double().cpu())
        return LossOutput(values)

    @property
    def sum(self) -> float:
        return float(self._losses.sum())
