"""The losses of the protocol against numbers computed by hand, from the data of a request to its reply."""

import math

import numpy as np
import pytest
import torch

from hone.service.protocol.data import pack_request
from hone.service.protocol.refusals import BadRequest
from hone.service.protocol.wire import Datum, TrainingRequest
from hone.types import ModelOutput

TOKENS = np.array([5, 6, 7])
NEXT = np.array([6, 7, 8])
LOGPROBS = [-1.0, -2.0, -0.5]  # of the model


def request(loss, *data, **settings):
    return TrainingRequest("m", 1, data, loss, settings, False, b"")


def datum(targets=NEXT, **inputs):
    return Datum(TOKENS, {"target_tokens": targets, **{name: np.array(v, np.float32) for name, v in inputs.items()}})


def computed(loss, *data, logprobs=None, **settings):
    """The work of a request after the loss was called with these log-probs for every datum."""
    work = pack_request(request(loss, *data, **settings), vocabulary=10, longest=16)
    rows = [[0.0, *LOGPROBS]] * len(data) if logprobs is None else logprobs
    flat = torch.tensor([one for row in rows for one in row], requires_grad=True)
    wide = {"logprobs_at": flat if flat.dim() == 2 else flat[:, None]}
    output = ModelOutput(extras=wide) if work.loss.needs else ModelOutput(logprobs=flat)
    result = work.loss(output, work.batch)
    result.values[work.batch.loss_mask].sum().backward()
    return work, flat.grad


def test_cross_entropy_is_the_weighted_sum_of_negative_log_probs():
    work, grad = computed("cross_entropy", datum(weights=[0, 1, 2]))
    assert work.loss.sum == pytest.approx(2.0 + 2 * 0.5)
    assert grad.tolist() == [0, 0, -1, -2]
    assert work.split()[0].tolist() == LOGPROBS


def test_weights_are_one_where_they_are_left_out():
    assert computed("cross_entropy", datum())[0].loss.sum == pytest.approx(3.5)


def test_targets_that_are_not_the_next_tokens_are_looked_up():
    work, _ = computed("cross_entropy", datum(np.array([0, 7, 8])))
    assert work.loss.needs == {"logprobs_at"}
    assert work.batch.ids_at[:, 0].tolist() == [0, 0, 7, 8]
    assert work.split()[0].shape == (3,)


def test_many_targets_at_each_place_and_one_beside_them():
    wide = datum(np.array([[1, 2], [3, 4], [5, 6]]), weights=[[0.5, 0.5], [1, 0], [0, 0]])
    rows = [[[0, 0], [-1, -3], [-2, -9], [-4, -4]], [[0, 0], [-1, 0], [-1, 0], [-1, 0]]]
    work, _ = computed("cross_entropy", wide, datum(weights=[1, 1, 1]), logprobs=np.array(rows, np.float32).tolist())
    assert work.loss.sum == pytest.approx(0.5 * 1 + 0.5 * 3 + 2 + 3)
    first, second = work.split()
    assert first.tolist() == [[-1, -3], [-2, -9], [-4, -4]]
    assert second.tolist() == [-1, -1, -1]


RATIO = math.exp(0.2)  # the log-prob is 0.2 above the one that the token was sampled with


@pytest.mark.parametrize(
    ("loss", "advantages", "value", "slope"),
    [
        ("importance_sampling", 2.0, -2 * RATIO, -2 * RATIO),
        ("ppo", 2.0, -2 * 1.2, 0.0),  # clipped from above
        ("ppo", -2.0, 2 * RATIO, 2 * RATIO),  # the worse of the two
        ("cispo", 2.0, -1.2 * -1.0 * 2, -1.2 * 2),
        ("dro", 2.0, -(-1.0 * 2 - 0.025 * 0.04), -(2 - 0.05 * 0.2)),
    ],
)
def test_a_token_of_each_policy_loss(loss, advantages, value, slope):
    one = datum(logprobs=[-1.2, -2.0, -0.5], advantages=[advantages, 0, 0])
    work, grad = computed(loss, one)
    rest = 0.025 * 0 if loss == "dro" else 0
    assert work.loss.sum == pytest.approx(value + rest, rel=1e-6)
    assert grad[1].item() == pytest.approx(slope, rel=1e-6)


def test_gspo_gives_every_token_the_ratio_of_its_sequence_and_its_own_gradient():
    first = datum(logprobs=[-1.1, -2.3, -9.0], advantages=[1, 1, 0], sequence_ratio_mask=[1, 1, 0])
    second = datum(logprobs=[-1.0, -2.0, -0.5], advantages=[0, 0, 1], sequence_ratio_mask=[0, 0, 1])
    work, grad = computed("gspo", first, second, clip_high_threshold=2.0)
    ratio = math.exp((0.1 + 0.3) / 2)
    assert work.loss.sum == pytest.approx(-2 * ratio - 1, rel=1e-6)
    assert grad.tolist() == pytest.approx([0, -ratio, -ratio, 0, 0, 0, 0, -1], rel=1e-6)


def test_thresholds_of_a_token_replace_those_of_the_request():
    one = datum(logprobs=[-1.2, -2.2, -0.7], advantages=[1, 1, 1], clip_high_threshold=[1.1, 9, 9])
    work, _ = computed("ppo", one, clip_low_threshold=0.9)
    assert work.loss.sum == pytest.approx(-1.1 - 2 * RATIO, rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (request("stable_reinforce", datum()), "importance_sampling or cispo"),
        (request("ppoo", datum()), "ppo"),
        (request("ppo", datum(logprobs=[0, 0, 0])), r"data\[0\].*advantages"),
        (request("ppo", datum(logprobs=[0, 0], advantages=[0, 0, 0])), "logprobs has the shape"),
        (request("cross_entropy", datum(mask=[1, 1, 1])), "mask"),
        (request("cross_entropy", datum(weights=[1, 1, math.nan])), "not finite"),
        (request("cross_entropy", datum(np.array([1, 2, 10]))), "token 10"),
        (request("ppo", datum(np.zeros((3, 2), np.int64), logprobs=[0], advantages=[0])), "target_tokens of ppo"),
        (request("cross_entropy", datum(), beta=1.0), "beta"),
        (request("dro", datum(logprobs=[0, 0, 0], advantages=[0, 0, 0]), beta="much"), "should be a number"),
        (request("dro", datum(logprobs=[0, 0, 0], advantages=[0, 0, 0]), beta=float("nan")), "should be a number"),
        (request("cross_entropy", Datum(np.arange(9) % 9, {"target_tokens": np.arange(9) % 9})), "at most 7"),
    ],
)
def test_a_wrong_request_is_refused_by_name(wrong, named):
    with pytest.raises(BadRequest, match=named):
        pack_request(wrong, vocabulary=10, longest=8)
