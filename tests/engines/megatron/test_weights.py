"""Rectangles of flat ranges, by hand, and the boxes of a fused matrix."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from hone.engines.megatron.names import Box, Names
from hone.engines.megatron.settings import Sizes
from hone.engines.megatron.weights import rectangles

BOX = Box("w", (12, 8), (4, 3), (4, 5), (2, 6), True)  # rows 2 to 6 of a parameter of 5 columns
ALL = (10, 30)


def _found(first, last):
    return [(begin, end, piece.offset, piece.shape) for begin, end, piece in rectangles(first, last, BOX, 5)]


@pytest.mark.parametrize(
    ("span", "wanted"),
    [
        (ALL, [(10, 30, (4, 3), (4, 5))]),
        ((12, 30), [(12, 15, (4, 5), (1, 3)), (15, 30, (5, 3), (3, 5))]),
        ((10, 18), [(10, 15, (4, 3), (1, 5)), (15, 18, (5, 3), (1, 3))]),
        ((13, 27), [(13, 15, (4, 6), (1, 2)), (15, 25, (5, 3), (2, 5)), (25, 27, (7, 3), (1, 2))]),
        ((16, 18), [(16, 18, (5, 4), (1, 2))]),
        ((30, 30), []),
        ((40, 30), []),
    ],
)
def test_a_flat_range_is_cut_into_rectangles(span, wanted):
    assert _found(*span) == wanted


def test_a_vector_is_one_rectangle():
    box = Box("b", (12,), (4,), (6,), (2, 8), True)
    found = [(begin, end, piece.offset, piece.shape) for begin, end, piece in rectangles(3, 7, box, 1)]
    assert found == [(3, 7, (5,), (4,))]


def test_heads_of_a_fused_matrix_lie_group_by_group():
    """4 query and 2 key-value heads of 3 rows; the second of two tensor ranks has the second group."""
    config = SimpleNamespace(hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=3, vocab_size=9)
    ranks = SimpleNamespace(sizes=Sizes(1, 2, 1, 1, 1, 1, False), tensor_rank=1)
    names = Names(config, ranks, "model.", 3, False)
    found = names.boxes("decoder.layers.1.self_attention.linear_qkv.weight", torch.empty(12, 12))
    assert [(box.name, box.whole, box.offset, box.rows) for box in found] == [
        ("model.layers.4.self_attn.q_proj.weight", (12, 12), (6, 0), (0, 6)),
        ("model.layers.4.self_attn.k_proj.weight", (6, 12), (3, 0), (6, 9)),
        ("model.layers.4.self_attn.v_proj.weight", (6, 12), (3, 0), (9, 12)),
    ]
    with pytest.raises(KeyError, match="no Hugging Face name"):
        names.boxes("decoder.layers.1.mystery.weight", torch.empty(1))
