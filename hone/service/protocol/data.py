"""The data of a training request, checked against its loss: everything is refused by the name of its datum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hone.algorithms.summed_losses import LOSSES, LossRule
from hone.registry import unknown
from hone.service.protocol.refusals import BadRequest
from hone.service.protocol.wire import TrainingRequest
from hone.workers.tenants.work import TARGETS, Datum, Work, work_of

NOT_SERVED = {
    "stable_reinforce": "choose importance_sampling or cispo (in the cookbook: loss_fn=importance_sampling)",
    "custom": "custom losses on the server are not; forward_backward_custom computes them in the client",
}


def pack_request(request: TrainingRequest, vocabulary: int, longest: int) -> Work:
    """Check and pack a request. Raises BadRequest naming the datum and the input that is wrong.

    `longest`: tokens of a sequence that the engine can take, the last target included.
    """
    rule, settings = _rule(request.loss), _settings(request.loss, request.settings)
    for number, datum in enumerate(request.data):
        _check(datum, f"data[{number}]", request.loss, rule, vocabulary)
    for number, datum in enumerate(request.data):
        if len(datum.tokens) >= longest:
            raise BadRequest(f"data[{number}] has {len(datum.tokens)} tokens; at most {longest - 1} are trained here")
    return work_of(request.loss, settings, request.data, request.forward_only)


def _rule(name: str) -> LossRule:
    """The loss of a name. Raises BadRequest with what there is."""
    if name in NOT_SERVED:
        raise BadRequest(f"loss_fn={name} is not served here: {NOT_SERVED[name]}")
    if name not in LOSSES:
        raise BadRequest(unknown("loss_fn", name, list(LOSSES)))
    return LOSSES[name]


def _settings(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """All settings of a loss. Raises BadRequest for one that it does not have, or a text."""
    known = LOSSES[name].settings
    found = dict(known)
    for key, value in given.items():
        if key not in known:
            raise BadRequest(f"loss_fn_config of {name}: " + unknown("setting", key, list(known)))
        if not isinstance(value, int | float) or value != value:  # inf is a threshold that nothing reaches
            raise BadRequest(f"loss_fn_config of {name}: {key} should be a number, found {value!r:.60}")
        found[key] = float(value)
    return found


def _check(datum: Datum, where: str, loss: str, rule: LossRule, vocabulary: int) -> None:
    """Refuse a datum whose inputs do not fit its loss."""
    inputs, length = datum.inputs, len(datum.tokens)
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
