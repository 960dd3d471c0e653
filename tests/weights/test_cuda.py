"""`ipc` through the memory of a GPU; it needs one device."""

import asyncio

import pytest
import torch

from hone.weights import TRANSPORTS
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports.memory import DeviceBuffers, SharedBuffers
from tests.weights.conftest import every_kind
from tests.weights.receiving import TOKEN

pytestmark = pytest.mark.gpu
one_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@one_device
def test_buckets_in_the_memory_of_the_device(replicas):
    engine, replica = TRANSPORTS.get("ipc")(1 << 14, 60, TOKEN), replicas("r0", ranks=2)
    weights = {name: tensor.detach().cuda() for name, tensor in every_kind().items()}

    async def whole():
        manager = CheckpointEngineManager(engine)
        manager.add_replica(replica)
        for version in (1, 2):
            await manager.sync(weights.items(), version)
            assert isinstance(engine._buffers, DeviceBuffers)
        await engine.close()

    asyncio.run(whole())


@one_device
def test_buckets_in_host_memory_are_page_locked_while_they_are_open():
    torch.zeros(1).cuda()  # this process uses its device
    buffers = SharedBuffers(1 << 20)
    kept = list(buffers.tensors)
    assert all(tensor.is_pinned() for tensor in kept)
    buffers.close()
    assert not any(tensor.is_pinned() for tensor in kept)
