"""Attention by tiles: the values and gradients of attention written out, without its memory."""

import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hone.models.attention import tiled
from hone.models.attention.packed import Scoring, attend, packed_attention_forward
from hone.models.attention.packed import packed as packed_row
from tests.models.dense_attention import (
    HEADS,
    PACKINGS,
    SCORINGS,
    dense,
    inputs,
    outputs_and_gradients,
    packing_of,
    visible,
)


def by_tiles(packing):
    return lambda q, k, v, scoring: attend(q, k, v, packing, scoring)


def written_out(seen):
    return lambda q, k, v, scoring: dense(q, k, v, seen, scoring)


def gap(found, expected):
    return float((found.double() - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("window", [None, 17, 150])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", PACKINGS)
def test_values_and_gradients_equal_attention_written_out(name, scoring, window):
    (lengths, parents), (softcap, sinks) = PACKINGS[name], SCORINGS[scoring]
    packing, seen = packing_of(lengths, parents), visible(lengths, parents, window)
    exact = inputs(sum(lengths), torch.float64, sinks, value_size=12)
    upstream = torch.randn(1, HEADS, sum(lengths), 12, dtype=torch.float64)
    expected = outputs_and_gradients(written_out(seen), exact, upstream, softcap, window)
    for dtype, value_gap, gradient_gap in ((torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-4)):
        narrow = [x.detach().to(dtype).requires_grad_() for x in exact]
        found = outputs_and_gradients(by_tiles(packing), narrow, upstream, softcap, window)
        assert gap(found[0], expected[0]) < value_gap
        assert max(gap(*pair) for pair in zip(found[1:], expected[1:], strict=True)) < gradient_gap


@pytest.mark.parametrize(
    "scoring", [pytest.param(one, marks=[] if one == "both" else pytest.mark.slow) for one in SCORINGS]
)
def test_bfloat16_is_as_close_as_attention_written_out(scoring):
    (lengths, parents), (softcap, sinks) = PACKINGS["prefixes"], SCORINGS[scoring]
    packing, seen, total = packing_of(lengths, parents), visible(lengths, parents, 100), sum(lengths)
    errors = torch.zeros(2, 5 if sinks else 4, dtype=torch.float64)
    for _ in range(4):  # the gradient of sinks is eight numbers, too few for one draw
        narrow = inputs(total, torch.bfloat16, sinks)
        upstream = torch.randn(1, HEADS, total, 16).bfloat16()
        wide = [x.detach().double().requires_grad_() for x in narrow]
        exact = outputs_and_gradients(written_out(seen), wide, upstream, softcap, 100)
        for i, function in enumerate((by_tiles(packing), written_out(seen))):
            found = outputs_and_gradients(function, narrow, upstream, softcap, 100)
            assert all(x.dtype == torch.bfloat16 for x in found)
            errors[i] += torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)])
    ours, theirs = errors.detach()
    assert (ours <= 1.1 * theirs)[:4].all(), errors
    assert (ours < 4 * 0.02).all(), errors


def test_a_cap_by_hand():
    """Scores of 0 and of 1,000 under a cap of ln 3 are 0 and ln 3: weights of 1/4 and 3/4, and no gradient."""
    q = torch.tensor([[0.0], [1000.0]]).view(1, 1, 2, 1).requires_grad_()
    k = torch.tensor([[0.0], [1.0]]).view(1, 1, 2, 1)
    v = torch.tensor([[4.0], [8.0]]).view(1, 1, 2, 1)
    out = attend(q, k, v, packing_of([2], [None]), Scoring(1.0, softcap=math.log(3)))
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))
    assert torch.autograd.grad(out.sum(), q)[0].abs().max() == 0


def test_a_sink_by_hand():
    """A sink of ln 3 takes 3/4 from one key of score 0, so the output loses 3/16 of the value per unit of the sink."""
    one, sink = torch.ones(1, 1, 1, 1), torch.tensor([math.log(3)], requires_grad=True)
    out = attend(0 * one, 0 * one, 8 * one, packing_of([1], [None]), Scoring(1.0, sinks=sink))
    assert out.item() == pytest.approx(2)
    assert torch.autograd.grad(out.sum(), sink)[0].item() == pytest.approx(-8 * 3 / 16)


def test_tiles_and_pieces_change_nothing(monkeypatch):
    lengths, parents = PACKINGS["prefixes"]
    tensors = inputs(sum(lengths), torch.float64, sinks=True)
    upstream, function = torch.randn(1, HEADS, sum(lengths), 16), by_tiles(packing_of(lengths, parents))
    expected = outputs_and_gradients(function, tensors, upstream, 3.0, 40)
    for tile, scores in ((7, 1), (1000, 1 << 30)):  # one head of one row at a time; a whole run at once
        monkeypatch.setattr(tiled, "_TILE", tile)
        monkeypatch.setattr(tiled, "_SCORES", scores)
        monkeypatch.setattr(tiled, "_SCORES_OF_A_ROW", scores)
        for one, other in zip(outputs_and_gradients(function, tensors, upstream, 3.0, 40), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(made) if torch.is_tensor(x)]
        self.elements = max([self.elements, *sizes])
        return made


def test_no_tensor_holds_all_scores_and_none_is_kept():
    tokens, kept = 1500, []
    tensors = inputs(tokens, torch.float32, sinks=True)
    packing = packing_of([tokens], [None])

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with Largest() as largest, saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attend(*tensors[:3], packing, Scoring(0.3, softcap=3.0, sinks=tensors[3]))
        out.sum().backward()
    assert max(kept) == HEADS * tokens * 16  # the queries
    assert sum(kept) <= sum(x.numel() for x in tensors) + HEADS * tokens
    assert largest.elements <= HEADS * 128 * (tokens + 1)  # the scores of one tile and the sinks


def test_frozen_sinks_and_inference_give_the_same():
    q, k, v, sinks = inputs(200, torch.float32, sinks=True)
    packing = packing_of([200], [None])
    trained = attend(q, k, v, packing, Scoring(0.3, sinks=sinks))
    frozen = attend(q, k, v, packing, Scoring(0.3, sinks=sinks.detach()))
    assert torch.equal(frozen, trained)
    expected = torch.autograd.grad(trained.sum(), q)[0]
    assert torch.equal(torch.autograd.grad(frozen.sum(), q)[0], expected)
    with torch.inference_mode():
        assert torch.equal(attend(q, k, v, packing, Scoring(0.3, sinks=sinks)), trained)


def test_dropout_of_such_weights_is_written_out():
    q, k, v, sinks = inputs(64, torch.float32, sinks=True)
    layer = torch.nn.Module()
    with packed_row(torch.tensor([0, 64])):
        one, other = (
            packed_attention_forward(layer, q, k, v, None, dropout=rate, softcap=5.0, s_aux=sinks)[0]
            for rate in (0.0, 0.5)
        )
    assert not torch.allclose(one, other)
