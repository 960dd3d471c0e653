"""What ends early leaves nothing behind, and what is over lets nobody in."""

import asyncio
import os
import resource
import socket
import time
from pathlib import Path

import pytest
import torch

from hone.weights.base import Full, WeightSyncError
from hone.weights.delivery import receive
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports.bucketed.folders import LOCK, OwnFolder, is_free, sweep
from hone.weights.transports.collective import CollectiveEngine
from hone.weights.transports.disk import DiskEngine
from hone.weights.transports.ipc.engine import IpcEngine
from hone.weights.transports.ipc.memory import SharedBuffers
from tests.weights.receiving import CONTEXT, TOKEN

BUCKET = 1 << 14


def weights():
    return {f"layer.{i}": torch.randn(40, 64) for i in range(5)}


def make_folder(parent, pipe):
    folder = OwnFolder(parent)
    pipe.send(str(folder.path))
    time.sleep(60)


def test_a_folder_of_a_killed_sender_is_removed_by_the_next(tmp_path):
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=make_folder, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert ours.poll(30)
    path = Path(ours.recv())
    assert not is_free(path)
    os.utime(path / LOCK, (0, 0))
    sweep(tmp_path)
    assert path.is_dir()
    process.kill()
    process.join()
    assert is_free(path)
    mine = OwnFolder(tmp_path)
    assert not path.exists()
    assert mine.path.is_dir()
    mine.close()
    assert not mine.path.exists()
    assert is_free(mine.path)


def test_a_sync_that_is_cancelled_while_it_ends_closes_its_socket_and_folder():
    """As a run that ends does to a publication."""

    async def story():
        engine = IpcEngine(BUCKET, 5.0, TOKEN)
        engine.build_topology({"r0": 1})
        engine.prepare(1, Full())
        folder, listening = engine._folder.path, engine._listener._socket
        assert folder.is_dir()
        ending = asyncio.create_task(engine.finalize())
        await asyncio.sleep(0)  # it has begun, and waits for the listener's tasks
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        return folder, listening

    folder, listening = asyncio.run(story())
    assert listening.fileno() == -1
    assert not folder.exists()


def test_buckets_have_no_name_that_could_be_left_behind():
    before = set(os.listdir("/dev/shm"))
    buffers = SharedBuffers(1 << 20)
    buffers.tensors[0].fill_(7)
    assert set(os.listdir("/dev/shm")) == before
    buffers.close()


def test_more_memory_than_there_is_is_an_error_before_anything_is_sent():
    with pytest.raises(WeightSyncError, match=r"choose a smaller weights\.bucket_mib"):
        SharedBuffers(1 << 50)


def test_a_bucket_that_the_system_refuses_is_an_error_with_the_key():
    """Here by its limit of the size of files, `ulimit -f`."""
    opened, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with pytest.raises(WeightSyncError, match=r"1048576 bytes \(File too large\).* weights\.bucket_mib"):
            SharedBuffers(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_bucket_is_allocated_as_far_as_it_is_written():
    buffers = SharedBuffers(1 << 30)
    taken = [lambda number=number: os.fstat(buffers.descriptors[number]).st_blocks * 512 for number in range(2)]
    buffers.allocate(0, 1 << 20)
    buffers.tensors[0][: 1 << 20].fill_(7)
    assert (taken[0](), taken[1]()) == (1 << 20, 0)
    buffers.allocate(0, 1 << 19)
    buffers.allocate(0, 3 << 20)
    assert taken[0]() == 3 << 20, "before it is written"
    assert buffers.tensors[0][(1 << 20) - 1] == 7
    buffers.close()


def test_the_rendezvous_listens_on_the_cluster_address_only(replicas):
    engine = CollectiveEngine(BUCKET, 20, TOKEN, host="127.0.0.1")
    replica, seen = replicas("r0"), []

    def stream():
        table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        inodes = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_socket(n)}
        listening = [line.split() for line in table.splitlines() if " 0A " in line]
        seen.extend(line[1].partition(":")[0] for line in listening if f"socket:[{line[9]}]" in inodes)
        yield from weights().items()

    async def whole():
        manager = CheckpointEngineManager(engine)
        manager.add_replica(replica)
        await manager.sync(stream(), 1)
        await engine.close()

    asyncio.run(whole())
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    mapped = f"{0:016X}FFFF0000{loopback}"  # the same address, of a socket of both families
    assert len(seen) >= 2
    assert set(seen) <= {loopback, mapped}


def _is_socket(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    except OSError:
        return False


def test_an_offer_of_a_sync_that_is_over_is_refused_at_once():
    async def offered(engine):
        engine.build_topology({"r0": 1})
        made = engine.prepare(1, Full()).for_replica("r0").to_json()
        await engine.close()
        return made

    for engine in (IpcEngine(BUCKET, 600, TOKEN), DiskEngine(BUCKET, 600, TOKEN)):
        old = asyncio.run(offered(engine))
        with pytest.raises(WeightSyncError, match="no sender of weights"), receive(old, 0, TOKEN):
            pass
