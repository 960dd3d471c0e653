"""Tensors that record what a loader reads of them, whole and as boxes."""

import pytest
import torch

from hone.models.parts.boxes import Boxed, whole
from hone.models.parts.views import OutsideBox, Reads, Viewed, viewed

SHAPE = (4, 6, 8)

LOADERS = {  # what a loader does -> the box that it reads
    "narrow": (lambda x: x.narrow(1, 2, 3) + 0, ((0, 4), (2, 5), (0, 8))),
    "narrow by name": (lambda x: x.narrow(dim=-1, start=-3, length=2) + 0, ((0, 4), (0, 6), (5, 7))),
    "torch.narrow": (lambda x: torch.narrow(x, 0, 1, 1) + 0, ((1, 2), (0, 6), (0, 8))),
    "slices": (lambda x: x[1:3, ..., 4:] + 0, ((1, 3), (0, 6), (4, 8))),
    "an index": (lambda x: x[-1] + 0, ((3, 4), (0, 6), (0, 8))),
    "an index inside": (lambda x: x[:, 2, 1:3] + 0, ((0, 4), (2, 3), (1, 3))),
    "select": (lambda x: x.select(1, -2).narrow(1, 0, 4) + 0, ((0, 4), (4, 5), (0, 4))),
    "two selects": (lambda x: x[1][2] + 0, ((1, 2), (2, 3), (0, 8))),
    "chunk": (lambda x: x.chunk(4, dim=1)[2] + 0, ((0, 4), (4, 6), (0, 8))),
    "split": (lambda x: x.split([1, 5], dim=1)[1] + 0, ((0, 4), (1, 6), (0, 8))),
    "split in equal parts": (lambda x: torch.split(x, 4, 2)[1] + 0, ((0, 4), (0, 6), (4, 8))),
    "unbind": (lambda x: x.unbind(0)[3] + 0, ((3, 4), (0, 6), (0, 8))),
    "squeeze": (lambda x: x.chunk(4)[2].squeeze().narrow(0, 1, 1).squeeze(0) + 0, ((2, 3), (1, 2), (0, 8))),
    "iteration": (lambda x: list(x)[2].chunk(2, 0)[1] + 0, ((2, 3), (3, 6), (0, 8))),
    "transpose": (lambda x: x.transpose(1, 2).narrow(1, 0, 2) + 0, ((0, 4), (0, 6), (0, 2))),
    "permute": (lambda x: x.permute(2, 0, 1)[7] + 0, ((0, 4), (0, 6), (7, 8))),
    "a turned matrix": (lambda x: x[1].t()[2:4] + 0, ((1, 2), (0, 6), (2, 4))),
    "T of a matrix": (lambda x: x[1].T[2:4] + 0, ((1, 2), (0, 6), (2, 4))),
    "mT": (lambda x: x.mT[:, 5:] + 0, ((0, 4), (0, 6), (5, 8))),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous()[:2].reshape(2, -1), ((0, 4), (0, 2), (0, 8))),
    "contiguous and viewed": (lambda x: x[:, 3:].contiguous().view(-1), ((0, 4), (3, 6), (0, 8))),
    "data": (lambda x: x.data[2:3] + 0, ((2, 3), (0, 6), (0, 8))),
    "two parts": (lambda x: x[0:1].sum() + x[2:3].sum(), ((0, 3), (0, 6), (0, 8))),
    "steps": (lambda x: x[::2] + 0, whole(SHAPE)),
    "a mask": (lambda x: x[x > 3], whole(SHAPE)),
    "a view": (lambda x: x.view(24, 8)[:2], whole(SHAPE)),
    "a new dimension": (lambda x: x[None, :1, None] + 0, ((0, 1), (0, 6), (0, 8))),
    "a new dimension that goes": (
        lambda x: x[2].unsqueeze(0).unbind()[0].narrow(1, 2, 3) + 0,
        ((2, 3), (0, 6), (2, 5)),
    ),
    "new dimensions elsewhere": (
        lambda x: x.unsqueeze(-1).unsqueeze(1).transpose(0, 1)[0, 3:] + 0,
        ((3, 4), (0, 6), (0, 8)),
    ),
    "another dtype": (lambda x: x.to(torch.float64)[:1], whole(SHAPE)),
    "a copy": (lambda x: torch.zeros(SHAPE).copy_(x), whole(SHAPE)),
    "a part that is joined": (lambda x: torch.cat([torch.ones(1, 6, 8), x[3:]]), ((3, 4), (0, 6), (0, 8))),
    "named arguments": (lambda x: torch.cat(tensors=[x[:1]]), ((0, 1), (0, 6), (0, 8))),
    "a chain in a parameter": (
        lambda x: torch.nn.Parameter(torch.zeros(2, 6)).data.copy_(x[1:3, :, 4]),
        ((1, 3), (0, 6), (4, 5)),
    ),
}


def tensor(dtype=torch.float32):
    return torch.arange(4 * 6 * 8.0).view(SHAPE).to(dtype)


@pytest.mark.parametrize("what", LOADERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loader_gets_the_same_of_a_box_as_of_everything(what, dtype):
    load, box = LOADERS[what]
    expected = load(tensor(dtype))
    reads = Reads()
    assert torch.equal(load(viewed("w", tensor(dtype), reads)), expected)
    assert reads.map() == {"w": Boxed(SHAPE, box)}
    again = Reads()
    part = tensor(dtype)[tuple(slice(*ends) for ends in box)].clone()
    found = load(viewed("w", part, again, Boxed(SHAPE, box)))
    assert torch.equal(found, expected)
    assert type(found) is torch.Tensor
    assert again.map() == reads.map()


@pytest.mark.parametrize("what", [name for name, (_, box) in LOADERS.items() if box != whole(SHAPE)])
def test_a_loader_that_reads_more_than_it_gets_is_an_error(what):
    load, box = LOADERS[what]
    dim = next(dim for dim, ends in enumerate(box) if ends != (0, SHAPE[dim]))
    less = (*box[:dim], (box[dim][0], box[dim][1] - 1), *box[dim + 1 :])
    part = tensor()[tuple(slice(*ends) for ends in less)]
    with pytest.raises(OutsideBox, match=r"the loader reads .* of w \[4, 6, 8\], of which only .* came"):
        load(viewed("w", part, Reads(), Boxed(SHAPE, less)))


def test_what_is_only_looked_at_is_not_read():
    reads = Reads()
    one = viewed("w", torch.zeros(2, 0), reads, Boxed((2, 3), ((0, 2), (0, 0))))
    assert (one.shape, one.dtype, one.numel(), one.dim(), len(one)) == ((2, 3), torch.float32, 6, 2, 2)
    assert (one.stride(), one.is_contiguous(), one.element_size(), one.nbytes) == ((3, 1), True, 4, 24)
    assert not one.is_cuda
    assert one.T.shape == (3, 2)
    assert one[1, 2:].shape == (1,)
    assert isinstance(one[1:], Viewed)
    assert reads.boxes == {}
    assert reads.map() == {"w": Boxed((2, 3), ((0, 0), (0, 0)))}
    with pytest.raises(OutsideBox):
        one.sum()


def test_errors_of_views_are_torchs():
    one = viewed("w", tensor(), Reads())
    for wrong in (lambda: one.narrow(0, 3, 2), lambda: one.select(0, 4), lambda: one[9], lambda: one.split([1], 0)):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()


def test_a_scalar_is_read_whole():
    reads = Reads()
    assert viewed("s", torch.tensor(3.5), reads).item() == 3.5
    assert reads.map() == {"s": Boxed((), ())}


def test_operators_that_pass_python_by_get_the_values():
    reads = Reads()
    assert torch.equal(torch.ops.aten.add.Tensor(viewed("w", tensor(), reads), 1), tensor() + 1)
    assert reads.boxes == {"w": whole(SHAPE)}


def test_a_part_of_another_shape_is_refused():
    with pytest.raises(OutsideBox, match=r"w came as \[4, 6, 8\], expected .* of \[8, 6, 8\]"):
        viewed("w", tensor(), Reads(), Boxed((8, 6, 8), ((0, 2), (0, 6), (0, 8))))
