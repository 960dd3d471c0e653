"""Layers with a state get each sequence of a packed row by itself: the layout by hand, and exactness in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hone.models.attention.packed import Packing, packed
from hone.models.attention.stateful import (
    Sequences,
    are_separate,
    separate_sequences,
    state_layers,
    takes_bounds,
    use_bounds,
)


def decaying_sum(x, decay, initial_state=None):
    states = [x[:, 0] if initial_state is None else initial_state * decay + x[:, 0]]
    for t in range(1, x.shape[1]):
        states.append(states[-1] * decay + x[:, t])
    return torch.stack(states, 1)


class BeginsAnew(nn.Module):
    """A convolution of four and a decaying sum, with transformers' calls for caches; its kernel takes no state."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 1, 4))
        self.decay = nn.Parameter(torch.rand(3) * 0.5 + 0.4)
        self.calls = []

    def forward(self, hidden_states, cache_params=None, attention_mask=None, shift=None):
        self.calls.append(tuple(hidden_states.shape[:2]))
        x = hidden_states.transpose(1, 2)
        if cache_params is not None:
            x = cache_params.update_conv_state(x, 0, conv_kernel_size=4)
        x = F.conv1d(F.pad(x, (3, 0)), self.kernel, groups=3)[..., -hidden_states.shape[1] :].transpose(1, 2)
        found = self.sum(x, cache_params)
        if cache_params is not None:
            cache_params.update_recurrent_state(found[:, -1], 0)
        return found + shift[..., None], found[:, -1]

    def sum(self, x, cache_params):
        return decaying_sum(x, self.decay)


class GoesOn(BeginsAnew):
    """The same with a kernel that begins with a state."""

    def sum(self, x, cache_params):
        known = cache_params is not None and cache_params.has_previous_state(0)
        return decaying_sum(x, self.decay, initial_state=cache_params.recurrent_states[0] if known else None)


def convolve(x, kernel, seq_idx=None):
    parts = [x] if seq_idx is None else x.split(torch.bincount(seq_idx[0]).tolist(), 2)
    return torch.cat([F.conv1d(F.pad(part, (3, 0)), kernel, groups=3) for part in parts], 2)


def sum_up(x, decay, cu_seqlens=None):
    parts = [x] if cu_seqlens is None else x.split(cu_seqlens.diff().tolist(), 1)
    return torch.cat([decaying_sum(part, decay) for part in parts], 1)


class TakesBounds(BeginsAnew):
    """The same with kernels that take the bounds of a row, by the names that transformers gives them."""

    def forward(self, hidden_states, cache_params=None, shift=None, **bounds):
        self.calls.append(tuple(hidden_states.shape[:2]))
        assert cache_params is None
        x = convolve(hidden_states.transpose(1, 2), self.kernel, bounds.get("seq_idx")).transpose(1, 2)
        found = sum_up(x, self.decay, cu_seqlens=bounds.pop("cu_seq_lens_q", None))
        return found + shift[..., None], found[:, -1]


class Pointwise(nn.Linear):
    """Sees one token at a time."""


def packing_of(lengths, parents):
    return Packing.of(torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)]), parents)


def test_the_layout_is_the_one_by_hand():
    found = Sequences.of(packing_of([2, 3, 1], [None, 0, 0]))  # two sequences share tokens 0 and 1
    assert [batch.tolist() for batch in found.batches] == [[[0, 1, 2, 3, 4]], [[0, 1, 5]]]
    assert found.places.tolist() == [5, 6, 2, 3, 4, 7]
    shared = Sequences.going_on(packing_of([2, 3, 1, 4], [None, 0, 0, None]))
    assert [batch.tolist() for batch in shared.batches] == [[[0, 1]], [[2, 3, 4]], [[5, 5]], [[6, 7, 8, 9]]]
    assert [None if begin is None else begin.tolist() for begin in shared.begins] == [None, [0], [0], None]
    assert (shared.prefixes, shared.places.tolist()) == (1, [0, 1, 2, 3, 4, 5, 7, 8, 9, 10])
    row = Sequences.end_to_end(packing_of([2, 3, 1], [None, 0, 0]))
    assert [batch.tolist() for batch in row.batches] == [[[0, 1, 2, 3, 4, 0, 1, 5]]]
    assert row.places.tolist() == [5, 6, 2, 3, 4, 7]
    assert row.bounds["seq_idx"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert row.bounds["cu_seqlens"].tolist() == [0, 5, 8]
    padded = Sequences.of(packing_of([4, 1, 5, 4], [None] * 4))
    assert [batch.tolist() for batch in padded.batches] == [
        [[5, 6, 7, 8, 9], [0, 1, 2, 3, 3]],
        [[10, 11, 12, 13]],
        [[4]],
    ]


@pytest.mark.parametrize("lengths", [[1000, *[3] * 200], [7] * 50, list(range(1, 120))])
def test_padding_adds_at_most_a_quarter_and_no_batch_is_larger_than_the_row(lengths):
    batches = Sequences.of(packing_of(lengths, [None] * len(lengths))).batches
    assert sum(batch.numel() for batch in batches) <= 1.25 * sum(lengths)
    assert max(batch.numel() for batch in batches) <= sum(lengths)


@pytest.mark.parametrize("cls", [BeginsAnew, GoesOn, TakesBounds])
@pytest.mark.parametrize("order", [tuple(range(11)), (6, 4, 0, 8, 2, 1, 9, 5, 3, 10, 7)])
def test_values_and_gradients_are_those_of_each_sequence_alone(order, cls):
    torch.manual_seed(0)
    layer = cls().double()
    shapes = {0: (5, None), 1: (1, 0), 2: (7, 0), 3: (9, None), 4: (2, None), 5: (4, 0)}  # length, prefix
    shapes |= {6: (3, None), 7: (4, 6), 8: (2, 6), 9: (5, None), 10: (6, 9)}
    lengths = [shapes[one][0] for one in order]
    parents = [None if shapes[one][1] is None else order.index(shapes[one][1]) for one in order]
    row = torch.randn(1, sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(1, sum(lengths), dtype=torch.float64)
    weight = torch.randn(sum(lengths), 3, dtype=torch.float64)
    parts = list(torch.arange(sum(lengths)).split(lengths))
    inputs = (row, *layer.parameters())

    alone = torch.zeros(sum(lengths), 3, dtype=torch.float64)
    for part, parent in zip(parts, parents, strict=True):
        whole = part if parent is None else torch.cat([parts[parent], part])
        alone = alone.index_copy(0, part, layer(row[:, whole], shift=shift[:, whole])[0][0, -len(part) :])
    expected = torch.autograd.grad((alone * weight).sum(), inputs)

    separate_sequences(layer)
    assert takes_bounds(layer) == (cls is TakesBounds)
    use_bounds(layer, takes_bounds(layer))
    layer.calls.clear()
    with packed(packing_of(lengths, parents)):
        found, state = layer(row, shift=shift)
    assert state is None  # states at the end of padded sequences mean nothing
    computed = sum(count * length for count, length in layer.calls)
    assert len(layer.calls) < 11
    assert (len(layer.calls) == 1) == (cls is TakesBounds)
    assert (computed <= 1.25 * sum(lengths)) == (cls is GoesOn), "prefixes are computed once, or by each"
    torch.testing.assert_close(found[0], alone, rtol=0, atol=1e-10)
    for one, other in zip(torch.autograd.grad((found[0] * weight).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_only_layers_with_a_state_are_changed():
    model = nn.ModuleDict({"mixer": GoesOn(), "mlp": Pointwise(3, 3)})
    assert list(state_layers(model)) == ["mixer"]
    assert not are_separate(model)
    separate_sequences(model)
    assert are_separate(model)
    assert "forward" not in vars(model["mlp"])
