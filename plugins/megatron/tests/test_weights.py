"""Rectangles of flat ranges, by hand, and the boxes of a fused matrix."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from hone_megatron.names import Box, Names
from hone_megatron.settings import Sizes
from hone_megatron.weights import rectangles

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


def _boxes_of_experts(family, kind, shape):
    """Names and boxes of the second of two ranks that share the last two of four experts."""
    config = SimpleNamespace(model_type=family, num_experts=4, hidden_size=6)
    config.get_text_config = lambda: config
    sizes = replace(Sizes(1, 1, 1, 1, 2, 1, False), expert_tensor=2)
    ranks = SimpleNamespace(sizes=sizes, expert_rank=1, expert_tensor_rank=1, tensor_rank=0)
    names = Names(config, ranks, "model.", 3, False)
    found = names.boxes(f"decoder.layers.1.mlp.experts.{kind}", torch.empty(shape))
    assert {box.name for box in found} == {f"model.layers.4.mlp.experts.{kind}"}
    return [(box.whole, box.offset, box.shape, box.rows) for box in found], {box.is_owner for box in found}


def test_ranks_that_share_experts_have_a_part_of_each_matrix():
    """Experts of 10 features, of which each rank has 5, on hidden states of 6."""
    whole, one = (4, 20, 6), (1, 5, 6)
    assert _boxes_of_experts("qwen3_moe", "gate_up_proj", (20, 6)) == (
        [
            (whole, (2, 5, 0), one, (0, 5)),
            (whole, (2, 15, 0), one, (5, 10)),
            (whole, (3, 5, 0), one, (10, 15)),
            (whole, (3, 15, 0), one, (15, 20)),
        ],
        {True},
    )
    whole, one = (4, 6, 10), (1, 6, 5)
    wanted = [(whole, (2, 0, 5), one, (0, 6)), (whole, (3, 0, 5), one, (6, 12))]
    assert _boxes_of_experts("qwen3_moe", "down_proj", (12, 5)) == (wanted, {True})


def test_transposed_experts_are_cut_along_the_other_axis():
    whole, one = (4, 6, 20), (1, 6, 10)
    wanted = [(whole, (2, 0, 10), one, (0, 6)), (whole, (3, 0, 10), one, (6, 12))]
    assert _boxes_of_experts("gpt_oss", "gate_up_proj", (12, 10)) == (wanted, {True})
    whole, one = (4, 10, 6), (1, 5, 6)
    wanted = [(whole, (2, 5, 0), one, (0, 5)), (whole, (3, 5, 0), one, (5, 10))]
    assert _boxes_of_experts("gpt_oss", "down_proj", (10, 6)) == (wanted, {True})
    wanted = [((4, 20), (2, 10), (1, 10), (0, 1)), ((4, 20), (3, 10), (1, 10), (1, 2))]
    assert _boxes_of_experts("gpt_oss", "gate_up_proj_bias", (2, 10)) == (wanted, {True})
    wanted = [((4, 6), (2, 0), (1, 6), (0, 1)), ((4, 6), (3, 0), (1, 6), (1, 2))]
    assert _boxes_of_experts("gpt_oss", "down_proj_bias", (2, 6)) == (wanted, {False})


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
