"""A batch with images reaches every rank whole, as a plan and arrays, also as a selection of what was sent before."""

import torch

from hone.data.packing import select
from hone.runtime.batch_plan import plan, to_array, unpack
from tests.engines.pictures import TEXT, batch_of


def same(one, other):
    assert torch.equal(one.token_ids, other.token_ids)
    assert (one.images is None) == (other.images is None)
    if one.images is not None:
        for name in one.images.__slots__:
            assert torch.equal(getattr(one.images, name), getattr(other.images, name)), name


def delivered(batch, parts):
    planned, arrays = plan(batch, parts, to_array)
    return [unpack(planned, iter(arrays), rank, lambda piece: piece) for rank in range(len(parts))]


def test_ranks_get_the_images_of_their_sequences():
    batch = batch_of()
    parts = [[8, 2, 0], list(TEXT), []]
    found = delivered(batch, parts)
    for part, got in zip(parts, found, strict=True):
        same(got, select(batch, part))
    assert found[1].images is None
    assert found[0].images.counts.tolist() == [1, 2, 1]


def test_a_mini_batch_that_is_a_selection_brings_the_images_of_its_own_sequences():
    whole = batch_of()
    for chosen in ([7, 2, 8, 3], [1, 6, 7, 7]):  # the second shows none, though the whole does
        part = select(whole, chosen)
        for rank, got in enumerate(delivered(part.with_(loss_weights=part.loss_weights * 2), [[0, 1], [2, 3]])):
            same(got, select(part, [2 * rank, 2 * rank + 1]))
