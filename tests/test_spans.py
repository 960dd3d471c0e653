"""Spans of a flat axis."""

import pytest
import torch

from hone.spans import cumulative, ranges, repeat, running_sums

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_repeated_as_often_as_counted(dtype):
    values = torch.tensor([3, 0, 5]).to(dtype)
    assert repeat(values, torch.tensor([2, 0, 1])).tolist() == [values[0].item()] * 2 + [values[2].item()]
    assert repeat(values, torch.tensor([2, 0, 1])).dtype == dtype


def test_repeated_values_carry_the_gradient_of_all_their_copies():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (repeat(values, torch.tensor([2, 0, 3])) * torch.arange(5.0)).sum().backward()
    assert values.grad.tolist() == [0 + 1, 0, 2 + 3 + 4]


def test_ranges_run_from_each_start_and_leave_their_input():
    starts, lengths = torch.tensor([7, 3, 0]), torch.tensor([2, 0, 3])
    assert ranges(starts, lengths).tolist() == [7, 8, 0, 1, 2]
    assert (starts.tolist(), lengths.tolist()) == ([7, 3, 0], [2, 0, 3])
    assert ranges(starts[:0], lengths[:0]).tolist() == []
    assert cumulative(lengths).tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_running_sums_are_the_same_where_only_deterministic_kernels_are_allowed(rows):
    values = torch.rand(rows, 50)
    expected = values.cumsum(-1)
    assert torch.equal(running_sums(values), expected)
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            assert torch.equal(running_sums(values), expected)
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        finally:
            torch.use_deterministic_algorithms(False)
