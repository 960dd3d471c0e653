"""Weights on a device: digests that are those of the CPU, and `ipc` between two processes through its memory.

Every test runs on the CPU too, so that on an accelerator only the device is new.
"""

import asyncio

import pytest
import torch

from hone.platforms.base import current_platform
from hone.platforms.cuda import CudaPlatform
from hone.weights import TRANSPORTS
from hone.weights.digests.digest import digest_tensors
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports.ipc.memory import DeviceBuffers, SharedBuffers
from tests.weights.conftest import every_kind
from tests.weights.receiving import TOKEN


def placed(device):
    """Weights of every kind on a device, and on the CPU."""
    here = {name: tensor.detach() for name, tensor in every_kind().items()}
    return {name: tensor.to(device) for name, tensor in here.items()}, here


def test_the_digest_is_that_of_the_cpu_and_notices_one_bit(each_device):
    there, here = placed(each_device)
    expected = digest_tensors(here.items(), "rows")
    assert digest_tensors(there.items(), "rows") == expected
    there["huge"].view(torch.int32)[-1, -1] ^= 1
    assert digest_tensors(there.items(), "rows") != expected


@pytest.mark.parametrize("in_place", [False, True])
def test_buckets_in_the_memory_of_the_device(in_place, each_device, replicas):
    """Two receiving processes prove the digest of every sync, with buckets far smaller than a tensor."""
    engine, replica = TRANSPORTS.get("ipc")(1 << 14, 60, TOKEN), replicas("r0", ranks=2)
    weights, _ = placed(each_device)

    async def whole():
        manager = CheckpointEngineManager(engine)
        manager.add_replica(replica)
        for version in (1, 2):
            await manager.sync(weights.items(), version)
            assert isinstance(engine._buffers, DeviceBuffers) == current_platform().supports_ipc
            replica.in_place = in_place
            weights["huge"].add_(1)
        await engine.close()

    asyncio.run(whole())
    assert replica.facts.keys() == weights.keys()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a CUDA device")
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locking needs a CUDA device")
def test_buckets_in_host_memory_are_page_locked_while_they_are_open():
    torch.zeros(1).cuda()  # this process uses its device
    buffers = SharedBuffers(1 << 20)
    kept = list(buffers.tensors)
    assert all(tensor.is_pinned() for tensor in kept)
    buffers.close()
    assert not any(tensor.is_pinned() for tensor in kept)
