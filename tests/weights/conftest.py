"""Weights of every kind, and replicas that are ended with the test."""

import pytest
import torch

from hone.weights.transports.bucketed.buckets import DTYPES
from tests.weights.receiving import ProcessReplica
from tests.weights.sending import Ranks

ALL_DTYPES = tuple(DTYPES.values())


@pytest.fixture
def replicas():
    """Makes replicas: `replicas("r0", ranks=2)`."""
    made = []

    def make(name="r0", **facts):
        made.append(ProcessReplica(name, **facts))
        return made[-1]

    yield make
    for replica in made:
        replica.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """`ranks(2)`: processes that live as long as these tests, rank n on the device gpu-n."""
    made = {}

    def get(count):
        if count not in made:
            made[count] = Ranks([f"gpu-{n}" for n in range(count)], tmp_path_factory.mktemp("store") / "store")
        made[count].orders.clear()
        return made[count]

    yield get
    for one in made.values():
        one.close()


def raw(dtype, *shape):
    """A tensor of any dtype whose bytes are random (of bool: 0 and 1)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def every_kind(dtypes=ALL_DTYPES):
    """Tensors of every dtype and awkward form: empty, scalar, huge, tied, transposed, sliced, expanded."""
    large, tied = torch.randn(50, 90), torch.randn(9, 7)
    weights = {f"dtype.{str(dtype)[6:]}": raw(dtype, 3, 5) for dtype in dtypes}
    return weights | {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "huge": torch.randn(130, 97),
        "tied.embedding": tied,
        "tied.head": tied,
        "transposed": large.T,
        "strided": large[::2, 5:60:3],
        "expanded": torch.randn(1, 6).expand(4, 6),
        "odd.bytes": raw(torch.uint8, 1237),
        "huge.transposed": torch.randn(97, 130, dtype=torch.bfloat16).T,
        "parameter": torch.nn.Parameter(torch.randn(4, 4)),
        "empty.last": torch.zeros(3, 0, dtype=torch.int8),
    }
