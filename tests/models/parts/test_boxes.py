"""Boxes of tensors, and maps of them as text."""

import pytest
import torch

from hone.models.parts.boxes import (
    Boxed,
    BoxError,
    contains,
    cover,
    from_text,
    hull,
    narrowed,
    nothing,
    overlap,
    to_text,
    whole,
)


def test_boxes_cover_a_tensor_or_leave_a_gap():
    left, right = ((0, 4), (0, 3)), ((0, 4), (3, 6))
    assert cover((4, 6), frozenset({left, right}))
    assert cover((4, 6), frozenset({left, ((0, 4), (2, 6))})), "they may overlap"
    assert cover((4, 6), frozenset({whole((4, 6)), nothing((4, 6))}))
    assert not cover((4, 6), frozenset({left, ((0, 4), (4, 6))}))
    assert not cover((4, 6), frozenset({left, ((0, 3), (3, 6))})), "an L"
    assert not cover((4, 6), frozenset({nothing((4, 6))}))
    assert cover((4, 6), frozenset({((0, 2), (0, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6))}))
    assert cover((), frozenset({()}))
    assert cover((0, 3), frozenset({((0, 0), (0, 3))}))


def test_hull_overlap_and_contains():
    one, other = ((0, 2), (1, 3)), ((1, 4), (0, 2))
    assert hull(one, other) == ((0, 4), (0, 3))
    assert overlap(one, other) == ((1, 2), (1, 2))
    assert overlap(one, ((2, 4), (0, 6))) is None
    assert hull(one, nothing((4, 6))) == hull(nothing((4, 6)), one) == one
    assert contains(((0, 4), (0, 6)), one)
    assert not contains(one, other)
    assert contains(nothing((4, 6)), nothing((4, 6)))


def test_a_box_of_a_box():
    tensor = torch.arange(24).view(4, 6)
    part = narrowed(tensor, ((1, 4), (2, 6)))
    assert torch.equal(narrowed(part, ((2, 3), (4, 6)), ((1, 4), (2, 6))), tensor[2:3, 4:6])
    assert narrowed(tensor, whole((4, 6))) is tensor
    with pytest.raises(BoxError, match=r"w is \[4, 6\], its receivers know it as \[4, 8\]"):
        Boxed((4, 8), ((0, 4), (0, 4))).of("w", tensor)


def test_a_map_is_the_same_as_text_and_leaves_out_what_is_whole():
    maps = {"a": Boxed((4, 6), ((0, 4), (0, 3))), "b": Boxed((5,), ((0, 5),)), "c": Boxed((4, 6), ((0, 4), (0, 3)))}
    text = to_text(maps)
    assert from_text(text) == {"a": maps["a"], "c": maps["c"]}
    assert to_text(dict(reversed(maps.items()))) == text
    assert to_text({"b": maps["b"]}) == ""
    assert from_text("") == {}


def test_the_text_of_a_large_mixture_fits_into_a_message():
    boxes = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight": Boxed((768, 2048), ((0, 384), (0, 2048)))
        for layer in range(94)
        for expert in range(128)
        for kind in ("gate", "up", "down")
    }
    assert len(to_text(boxes)) < 3 << 18


@pytest.mark.parametrize(
    "text", ["?", "eJw=", to_text({"a": Boxed((4,), ((2, 9),))}), to_text({"a": Boxed((4, 4), ((0, 1),))})]
)
def test_a_text_that_is_no_map_is_refused(text):
    with pytest.raises(BoxError, match="a map of boxes cannot be read"):
        from_text(text)
