"""Batches on their way to ranks: each gets its own sequences, whatever was cut before, and nothing travels twice."""

import itertools

import pytest
import torch

from hone.data.packing import Sample, columns, pack_samples, select
from hone.runtime.batch_plan import Distant, Piece, plan, to_array, unpack

LENGTHS = [4, 1, 3, 2, 5]


def make_batch():
    counter = itertools.count(10)
    samples = [Sample(tuple(next(counter) for _ in range(n)), (0,) + (1,) * (n - 1)) for n in LENGTHS]
    batch = pack_samples(samples)
    return batch.with_(
        rewards=torch.arange(5.0),
        old_logprobs=-batch.token_ids.float(),
        components={"share": torch.arange(5.0) / 10},
        extras={"pairs": torch.stack([batch.token_ids, batch.position_ids], 1)},
    )


class Store:
    """Counts what is put, and remembers it as long as the test runs."""

    def __init__(self):
        self.arrays = []

    def put(self, tensor):
        for number, (known, _) in enumerate(self.arrays):
            if known is tensor:
                return number, str(tensor.dtype).removeprefix("torch.")
        self.arrays.append((tensor, to_array(tensor)[0]))
        return len(self.arrays) - 1, str(tensor.dtype).removeprefix("torch.")

    def deliver(self, batch, parts, rank):
        planned, references = plan(batch, parts, self.put)
        return unpack(planned, iter([self.arrays[one][1] for one in references]), rank, lambda number: number)


def assert_equal(one, other):
    mine, theirs = ({key: value for key, _, value in columns(batch)} for batch in (one, other))
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []


PARTS = [[2, 0], [1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_selection_is_delivered_from_the_whole(rank):
    batch, store = make_batch(), Store()
    store.deliver(batch, [[0, 1], [2, 3, 4]], rank)
    sent = len(store.arrays)
    assert sent == 10
    weights = torch.arange(9.0)
    part = select(batch, [4, 3, 1, 1][:3]).with_(old_logprobs=None, loss_weights=torch.arange(8.0))
    part = part.with_(rewards=torch.tensor([7.0, 8.0, 9.0]), extras={**part.extras, "picked": weights[:8]})
    assert_equal(store.deliver(part, PARTS, rank), select(part, PARTS[rank]))
    assert len(store.arrays) == sent + 3  # loss weights, rewards, picked: the rest was there
    store.deliver(select(batch, [0, 2]), [[0], [1]], rank)
    assert len(store.arrays) == sent + 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_selection_of_a_selection(rank):
    batch, store = make_batch(), Store()
    part = select(select(batch, [4, 3, 1, 0]).with_(values=torch.arange(12.0)), [3, 0, 1])
    assert_equal(store.deliver(part, PARTS, rank), select(part, PARTS[rank]))


def test_values_that_stay_with_the_ranks_are_gathered_where_they_are_read():
    """Three sequences of one rank and two of another; a mini-batch of four of them goes to two ranks again."""
    batch, store = make_batch(), Store()
    states = torch.arange(30.0).view(15, 2)
    held = [[0, 3, 4], [1, 2]]
    full = batch.with_(extras={"states": states})
    pieces = tuple(
        Piece(to_array(select(full, sequences).extras["states"].to(torch.bfloat16))[0], "bfloat16", tuple(sequences))
        for sequences in held
    )
    fetched = []
    away = batch.with_(extras={"states": Distant(15, pieces)})
    chosen, parts = [4, 1, 0, 2], [[0, 1], [2], [3], []]
    cut = select(away, chosen)
    for rank, part in enumerate(parts):
        planned, references = plan(cut, parts, store.put)
        arrays = iter([store.arrays[one][1] for one in references])
        own = unpack(planned, arrays, rank, lambda array: fetched.append(len(array)) or array)
        expected = select(full, [chosen[i] for i in part]).extras["states"]
        assert torch.equal(own.extras["states"].float(), expected)
        assert own.extras["states"].dtype == torch.bfloat16
    assert fetched == [11, 4, 11, 4, 11]  # both; the first; the second; an empty part asks for a shape only
