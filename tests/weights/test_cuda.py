"""`ipc` through the memory of a GPU; it needs one device."""

import asyncio

import pytest
import torch

from hone.platforms.cuda import CudaPlatform
from hone.weights import TRANSPORTS
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports.memory import DeviceBuffers
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
def test_a_handle_is_made_once_for_each_receiver_and_bucket(replicas, monkeypatch):
    """torch frees shared memory only when every handle that it made was opened and released."""
    engine, replica, made = TRANSPORTS.get("ipc")(1 << 22, 60, TOKEN), replicas("r0", ranks=2), []
    share = CudaPlatform.share

    def noting(platform, tensor):
        made.append(tensor.data_ptr())
        return share(platform, tensor)

    monkeypatch.setattr(CudaPlatform, "share", noting)

    async def whole():
        manager = CheckpointEngineManager(engine)
        manager.add_replica(replica)
        for version in range(1, 6):
            await manager.sync({"w": torch.randn(1000)}.items(), version)
        assert len(made) == 4
        await engine.close()

    asyncio.run(whole())
