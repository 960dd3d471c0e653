"""Tensors side by side in one memory."""

import pytest
import torch

from hone.weights.digests.packed import REMEMBERED, ROW, Entry, Packed, flat, layout, pack, place, together


def test_every_tensor_begins_with_a_row_and_comes_out_as_it_was():
    a, b, c = torch.randn(3, 5), torch.arange(600).view(2, 300).T, torch.tensor(2.5, dtype=torch.bfloat16)
    tensors = {"a": a, "empty": torch.zeros(0, 4), "b": b, "c": c}
    room = torch.full((5 * ROW,), 255, dtype=torch.uint8)
    packed = pack(list(tensors.items()), room)
    assert packed.entries[0] == Entry("a", torch.float32, (3, 5), 0, 60)
    assert [entry.begin for entry in packed.entries] == [0, ROW, ROW, 4 * ROW]
    assert packed.size == 60 + 4800 + 2
    assert room[60:ROW].eq(0).all()
    assert room[ROW + 4800 : 4 * ROW].eq(0).all()
    assert room[4 * ROW + 2 :].eq(0).all()
    kept = Packed(packed.data.clone(), packed.entries)
    room.fill_(7)
    found = dict(kept)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert not torch.equal(dict(packed)["a"], a)


def test_a_single_tensor_is_not_copied_unless_it_is_told_where():
    a = torch.randn(7)
    assert pack([("a", a)]).data.data_ptr() == a.data_ptr()
    room = torch.empty(ROW, dtype=torch.uint8)
    assert pack([("a", a)], room).data.data_ptr() == room.data_ptr()
    assert torch.equal(room[:28].view(torch.float32), a)


def test_single_tensors_do_not_push_out_what_is_remembered_of_groups():
    group = (("a", torch.float32, (3, 5)), ("b", torch.bfloat16, (7,)))
    first = layout(group)
    for number in range(2 * REMEMBERED):
        pack([(f"single.{number}", torch.randn(4))])
    assert layout(group) is first  # a digest of many single tensors comes between two syncs


def test_what_does_not_fit_is_an_error_and_nothing_is_written():
    room = torch.full((ROW,), 255, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2 tensors of 4096 bytes do not fit into 2048"):
        pack([("a", torch.zeros(3)), ("b", torch.zeros(3))], room)
    assert room.eq(255).all()


def test_what_is_not_its_own_bytes_is_copied_as_what_it_means():
    """Strides, conjugates and negatives that are only noted, learned ones, classes of their own; and every dtype."""

    class Own(torch.Tensor):
        pass

    conjugate = torch.randn(3, 4, dtype=torch.complex64).conj()
    tensors = {
        "conjugate": conjugate,
        "negative": conjugate.imag,
        "turned": torch.randn(30, 40).T,
        "learned": torch.randn(5, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "own": torch.randn(7).as_subclass(Own),
        "expanded": torch.randn(1, 3).expand(5, 3),
        "one": torch.randn(4, 2)[:1, 1],
        "nan": torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32),
    }
    room = torch.full((20 * ROW,), 255, dtype=torch.uint8)
    entries = pack(list(tensors.items()), room).entries
    assert [entry.name for entry in place(tensors.items(), entries, room)] == list(tensors)
    for name, tensor in Packed(room, entries):
        meant = torch.empty(tensors[name].shape, dtype=tensors[name].dtype).copy_(tensors[name].detach())
        assert torch.equal(tensor.view(torch.uint8), meant.view(torch.uint8)), name
        assert (tensor.shape, tensor.stride()) == (meant.shape, meant.stride())


def test_a_single_element_of_a_row_is_its_own_bytes():
    """Contiguous to torch, with the stride of the row."""
    one = torch.randn(4, 2)[1:2, 1]
    assert one.is_contiguous()
    assert flat(one).view(torch.float32).item() == one.item()


def test_groups_count_whole_rows_and_leave_large_ones_alone():
    tensors = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (1, 2048, 2049, 9000, 5)]
    found = [[name for name, _ in some] for some in together(tensors, most=3 * ROW)]
    assert found == [["1", "2048"], ["2049"], ["9000"], ["5"]]
