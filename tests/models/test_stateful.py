"""Layers with a state get each sequence of a packed row by itself: the layout by hand, and exactness in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hone.models.attention.packed import Packing, packed
from hone.models.attention.stateful import Sequences, are_separate, separate_sequences, state_layers


class Carrying(nn.Module):
    """A convolution of four and a decaying sum, with transformers' calls for caches."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 1, 4))
        self.decay = nn.Parameter(torch.rand(3) * 0.5 + 0.4)
        self.calls = []

    def forward(self, hidden_states, cache_params=None, attention_mask=None, shift=None):
        self.calls.append(tuple(hidden_states.shape[:2]))
        x = hidden_states.transpose(1, 2)
        if cache_params is not None:
            cache_params.update_conv_state(x, 0)
        x = F.conv1d(F.pad(x, (3, 0)), self.kernel, groups=3).transpose(1, 2)
        states = [x[:, 0]]
        for t in range(1, x.shape[1]):
            states.append(states[-1] * self.decay + x[:, t])
        return torch.stack(states, 1) + shift[..., None], states[-1]


class Pointwise(nn.Linear):
    """Sees one token at a time."""


def packing_of(lengths, parents):
    return Packing.of(torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)]), parents)


def test_the_layout_is_the_one_by_hand():
    found = Sequences.of(packing_of([2, 3, 1], [None, 0, 0]))  # two sequences share tokens 0 and 1
    assert [batch.tolist() for batch in found.batches] == [[[0, 1, 2, 3, 4]], [[0, 1, 5]]]
    assert found.places.tolist() == [5, 6, 2, 3, 4, 7]
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


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (4, 0, 2, 1, 5, 3)])
def test_values_and_gradients_are_those_of_each_sequence_alone(order):
    torch.manual_seed(0)
    layer = Carrying().double()
    shapes = {0: (5, None), 1: (1, 0), 2: (7, 0), 3: (9, None), 4: (2, None), 5: (4, 0)}
    lengths = [shapes[one][0] for one in order]
    parents = [None if shapes[one][1] is None else order.index(0) for one in order]
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
    layer.calls.clear()
    with packed(packing_of(lengths, parents)):
        found, state = layer(row, shift=shift)
    assert state is None  # states at the end of padded sequences mean nothing
    assert len(layer.calls) < 5
    torch.testing.assert_close(found[0], alone, rtol=0, atol=1e-10)
    for one, other in zip(torch.autograd.grad((found[0] * weight).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_only_layers_with_a_state_are_changed():
    model = nn.ModuleDict({"mixer": Carrying(), "mlp": Pointwise(3, 3)})
    assert list(state_layers(model)) == ["mixer"]
    assert not are_separate(model)
    separate_sequences(model)
    assert are_separate(model)
    assert "forward" not in vars(model["mlp"])
