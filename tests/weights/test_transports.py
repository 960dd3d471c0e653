"""What every transport must do, with receivers in processes of their own."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hone.testing import TransportContract
from hone.testing.transport import FILE_DTYPES
from hone.weights import TRANSPORTS, sync
from hone.weights.base import Full, WeightSyncError
from hone.weights.delivery import receive
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports import collective
from hone.weights.transports.bucketed.buckets import Packer
from hone.weights.transports.collective import DROPPING
from hone.weights.transports.delta import DeltaEngine
from hone.weights.transports.ipc.engine import PART
from hone.weights.transports.ipc.memory import SharedBuffers
from tests.weights.receiving import CONTEXT, TOKEN, ProcessReplica

BUCKET = 1 << 14  # bytes: smaller than some tensors, larger than most

MAKE = {
    "ipc": lambda: TRANSPORTS.get("ipc")(BUCKET, 30, TOKEN),
    "collective": lambda: TRANSPORTS.get("collective")(BUCKET, 30, TOKEN),
    "nixl": lambda: TRANSPORTS.get("nixl")(BUCKET, 30, TOKEN),
    "disk": lambda: TRANSPORTS.get("disk")(BUCKET, 30, TOKEN),
    "delta over ipc": lambda: DeltaEngine(BUCKET, 30, TOKEN, over="ipc"),
    "delta over collective": lambda: DeltaEngine(BUCKET, 30, TOKEN, over="collective"),
}
BUCKETED = ["ipc", "collective", "nixl", "delta over ipc"]
every_transport = pytest.mark.parametrize("transport", MAKE)


class OfTransport(TransportContract):
    """Receivers are forked from a process that has imported everything, which saves their starts."""

    transport = ""

    def make(self, bucket_bytes, timeout_s, token):
        return TRANSPORTS.get(self.transport)(bucket_bytes, timeout_s, token)

    def device(self):
        return torch.device("cpu")

    def replica(self, name, ranks, token):
        return ProcessReplica(name, ranks, token)


class TestIpc(OfTransport):
    transport = "ipc"


class TestCollective(OfTransport):
    transport = "collective"


class TestDisk(OfTransport):
    transport = "disk"
    dtypes = FILE_DTYPES


class OfDelta(OfTransport):
    partial = True

    def make(self, bucket_bytes, timeout_s, token):
        return DeltaEngine(bucket_bytes, timeout_s, token, over=self.transport)


class TestDeltaOverIpc(OfDelta):
    transport = "ipc"


class TestDeltaOverCollective(OfDelta):
    transport = "collective"


@pytest.mark.slow
class TestProcessesOfTheSuite(OfTransport):
    """The suite's own receivers, as a plug-in's tests and `hone doctor` have them."""

    transport = "ipc"
    replica = TransportContract.replica


def plain():
    return {f"layer.{i}": torch.randn(40, 64) for i in range(8)}  # 10 KiB each: one to a bucket


def run(engine, body):
    """Run `await body(manager, engine)` and close the engine."""

    async def whole():
        try:
            return await body(CheckpointEngineManager(engine))
        finally:
            await engine.close()

    return asyncio.run(whole())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_large_tensors_come_in_parts_between_small_ones(copy, in_place, replicas):
    """More than what is told of at a time, more than what a bucket takes of small ones, and more than a bucket."""
    replica, engine = replicas("r0"), TRANSPORTS.get("ipc")(40 << 20, 30, TOKEN)
    replica.copy, replica.in_place = copy, in_place
    weights = {f"{i}.small": torch.randn(100, 1000) for i in range(30)} | {"9.large": torch.randn(9000, 1000)}
    weights |= {f"{i}.many": torch.randn(300, 400) for i in range(100)} | {"9.cut": torch.randn(11_000, 1000)}
    weights = dict(sorted(weights.items()))

    async def body(manager):
        manager.add_replica(replica)
        for version in (1, 2, 3):
            for tensor in weights.values():
                tensor += version
            metrics = await manager.sync(weights.items(), version)
            assert metrics["weights/buckets"].value == 4
            assert replica.facts == {name: (str(t.dtype), tuple(t.shape)) for name, t in weights.items()}

    run(engine, body)


def test_a_bucket_is_allocated_before_it_is_written_and_no_further(replicas, monkeypatch):
    """Otherwise a copy would end the process with a bus error when memory runs out."""
    engine, replica, seen, fill = TRANSPORTS.get("ipc")(1 << 30, 30, TOKEN), replicas("r0"), [], Packer.fill

    def taken():
        return [os.fstat(descriptor).st_blocks * 512 for descriptor in engine._buffers.descriptors]

    async def noting(packer, bucket, begin=0):
        before = taken()
        filled = await fill(packer, bucket, begin)
        number = [tensor.data_ptr() for tensor in engine._buffers.tensors].index(bucket.data_ptr())
        seen.append((filled.used, before[number]))
        return filled

    monkeypatch.setattr(Packer, "fill", noting)
    small, large = torch.randn(3 << 20), torch.randn(9 << 20)  # 12 and 36 MiB

    async def body(manager):
        manager.add_replica(replica)
        await manager.sync(plain().items(), 1)
        assert max(taken()) < 3 * PART
        await manager.sync({**plain(), "a": small, "b": large, "c": small, "d": small}.items(), 2)
        assert max(used for used, _ in seen) > 2 * PART
        assert all(used <= there for used, there in seen)
        assert sum(taken()) < 1 << 28

    run(engine, body)


def test_a_receiver_is_given_the_memory_again_only_if_it_has_not_kept_it(replicas, monkeypatch):
    """A handle of device memory counts as a user of it until somebody opens it, so none is made without need."""
    first, second, described = replicas("r0", ranks=2), replicas("r1"), []
    describe = SharedBuffers.describe

    def noting(buffers, is_mapped):
        described.append(is_mapped)
        return describe(buffers, is_mapped)

    monkeypatch.setattr(SharedBuffers, "describe", noting)

    async def body(manager):
        manager.add_replica(first)
        await manager.sync(plain().items(), 1)
        assert described == [False, False]
        manager.add_replica(second)
        await manager.sync(plain().items(), 2)
        assert sorted(described[2:]) == [False, True, True]
        await manager.sync(plain().items(), 3)
        assert described[5:] == [True, True, True]

    run(MAKE["ipc"](), body)


def test_what_is_read_from_files_owns_its_memory(tmp_path):
    """A single tensor of a group would be a view of the file, which is removed when the sync is over."""
    weights = {"large": torch.randn(700, 700), "small": torch.randn(3), "last": torch.randn(2)}
    engine = TRANSPORTS.get("disk")(BUCKET, 30, TOKEN, folder=tmp_path)

    def take(offer):
        with receive(offer, 0, TOKEN) as delivery:
            return dict(delivery)

    async def whole():
        engine.build_topology({"r0": 1})
        offer = engine.prepare(1, Full()).for_replica("r0").to_json()
        await engine.send_weights(weights.items(), 1)
        held = await asyncio.to_thread(take, offer)
        assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        await engine.close()

    asyncio.run(whole())


@pytest.mark.parametrize("fault", ["dies:3", "raises:3", "leaves:3"])
@pytest.mark.parametrize("transport", ["ipc", "nixl", "disk"])
def test_the_other_replicas_are_served_when_one_fails(transport, fault, replicas):
    good, bad, weights = replicas("good", ranks=2), replicas("bad"), plain()
    bad.fault = fault

    async def body(manager):
        manager.add_replica(good)
        manager.add_replica(bad)
        with pytest.raises(WeightSyncError, match="1 of 2 replicas: replica bad") as at:
            await manager.sync(weights.items(), 5)
        assert at.value.replicas == ("bad",)
        assert manager.versions == {"good": 5}
        assert good.asked == ["pause keep", "resume"]
        assert bad.asked[0] == "pause keep"
        assert "resume" not in bad.asked

    run(MAKE[transport](), body)


@pytest.mark.slow
def test_a_killed_receiver_is_noticed_though_its_replica_says_nothing(replicas, monkeypatch):
    """The kernel closes the connection: nobody has to wait for the deadline of 30 s."""
    monkeypatch.setattr(sync, "REASON_TIMEOUT_S", 1.0)
    replica = replicas("r0")
    replica.fault = "dies:4"
    receive = replica.receive_weights

    async def mute(offer):
        try:
            return await receive(offer)
        except EOFError:
            return await asyncio.sleep(20)

    replica.receive_weights = mute

    async def body(manager):
        manager.add_replica(replica)
        with pytest.raises(WeightSyncError, match="replica r0: its rank 0: it died, or disconnected"):
            await manager.sync(plain().items(), 1)

    run(MAKE["ipc"](), body)


@pytest.mark.slow
@pytest.mark.parametrize("transport", BUCKETED)
def test_a_silent_receiver_meets_the_deadline(transport, replicas, monkeypatch):
    monkeypatch.setattr(sync, "REASON_TIMEOUT_S", 1.0)
    engine = MAKE[transport]()
    for part in (engine, getattr(engine, "_carrier", engine)):
        part.timeout_s = 12 if transport == "nixl" else 4.5  # NIXL takes a second to start on each side
    replica, weights = replicas("r0"), plain()
    replica.fault = "silent:3"
    limit_s = "4" if transport == "nixl" else "1.5"

    async def body(manager):
        manager.add_replica(replica)
        try:
            with pytest.raises(WeightSyncError, match=rf"replica r0: .*within {limit_s} s"):
                await manager.sync(weights.items(), 1)
        finally:
            os.kill(replica.processes[0].process.pid, signal.SIGKILL)  # ends the thread that waits for its answer

    run(engine, body)


@pytest.mark.slow
def test_a_sync_does_not_wait_for_the_group_of_a_receiver_that_hangs(replicas, monkeypatch):
    """Deleting gloo's group waits for the receiver. The event loop, which kills the receiver, must not wait."""
    monkeypatch.setattr(sync, "REASON_TIMEOUT_S", 1.0)
    monkeypatch.setattr(sync, "STOP_TIMEOUT_S", 1.0)
    replica = replicas("r0")
    receiver = replica.processes[0].process.pid

    def until_it_hangs():
        for number in range(4):
            if number == 2:
                os.kill(receiver, signal.SIGSTOP)
            yield f"layer.{number}", torch.zeros(1 << 22)  # one to a bucket, and more than sockets hold

    async def body(manager):
        manager.add_replica(replica)
        try:
            with pytest.raises(WeightSyncError, match=r"replica r0: .*the broadcast failed: it did not end within 5 s"):
                await manager.sync(until_it_hangs(), 1)
            dropping = [one for one in threading.enumerate() if one.name == DROPPING]
        finally:
            os.kill(receiver, signal.SIGKILL)
        assert len(dropping) == 1
        dropping[0].join(timeout=60)
        assert not dropping[0].is_alive()

    run(TRANSPORTS.get("collective")(1 << 24, 15, TOKEN), body)


@every_transport
def test_a_tied_head_that_stays_as_it_was_is_caught(transport, replicas):
    replica, weights = replicas("r0"), plain()
    weights["embedding"] = weights["lm_head"] = torch.randn(8, 4)

    async def body(manager):
        manager.add_replica(replica)
        await manager.sync(weights.items(), 1)
        weights["embedding"] += 1
        replica.fault = "keeps:lm_head"
        with pytest.raises(WeightSyncError, match="a tensor was lost, stale or changed on the way"):
            await manager.sync(weights.items(), 2)
        assert "resume" not in replica.asked[-2:]

    run(MAKE[transport](), body)


def sender(transport, pipe):
    """A trainer's process that stops in the middle of a stream."""
    engine = MAKE[transport]()

    def stream():
        for count, item in enumerate(plain().items()):
            if count == 5:
                pipe.send("middle")
                signal.pause()
            yield item

    async def whole():
        engine.build_topology({"r0": 1})
        pipe.send(engine.prepare(1, Full()).for_replica("r0").to_json())
        await engine.init_process_group()
        await engine.send_weights(stream(), 1)

    asyncio.run(whole())


@pytest.mark.parametrize("transport", ["ipc", "nixl", "disk"])
def test_a_killed_sender_is_noticed_at_once_and_leaves_nothing(transport):
    before = set(Path("/dev/shm").iterdir())
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=sender, args=(transport, theirs), daemon=True)
    process.start()
    assert ours.poll(30)
    offer = ours.recv()

    def take():
        count = 0
        with receive(offer, 0, TOKEN) as delivery:
            for _ in delivery:
                count += 1
                if count == 4:
                    process.kill()
                    process.join()

    def wait_and_take():
        if transport == "disk":  # nothing to take before the manifest is there
            assert ours.poll(30)
            process.kill()
            process.join()
        take()

    with pytest.raises(WeightSyncError, match=r"died while r0/0 waited|no sender of weights"):
        wait_and_take()
    assert set(Path("/dev/shm").iterdir()) == before


def test_no_replica_is_an_error():
    async def body(manager):
        with pytest.raises(WeightSyncError, match="there is no replica to receive weight version 1"):
            await manager.sync([], 1)

    run(MAKE["ipc"](), body)


def test_a_replica_that_does_not_pause_in_time_is_stopped_and_nothing_is_sent(replicas):
    engine = MAKE["ipc"]()
    engine.timeout_s = 1.5
    slow = replicas("slow")
    slow.delays["pause"] = 5

    async def body(manager):
        manager.add_replica(slow)
        with pytest.raises(WeightSyncError, match=r"replica slow: it did not pause within 0\.5 s"):
            await manager.sync(plain().items(), 1)

    run(engine, body)


def test_a_replica_that_is_silent_after_the_last_tensor_costs_no_other(replicas, monkeypatch):
    """It may have been stopped there: the others have acknowledged what was sent, and serve it."""
    monkeypatch.setattr(sync, "STOP_TIMEOUT_S", 0.5)
    engine, silent = MAKE["ipc"](), asyncio.Event()
    engine.timeout_s = 1.5
    good, mute = replicas("good"), replicas("mute")
    receive = mute.receive_weights

    async def unacknowledged(offer):
        await receive(offer)
        await silent.wait()

    mute.receive_weights = unacknowledged

    async def body(manager):
        manager.add_replica(good)
        manager.add_replica(mute)
        said = r"by 1 of 2 replicas: replica mute: weight version 1 was not sent and acknowledged within 1\.5 s"
        with pytest.raises(WeightSyncError, match=said):
            await manager.sync(plain().items(), 1)
        assert manager.versions == {"good": 1}
        assert good.asked[-1] == "resume"

    run(engine, body)


def test_a_sync_that_is_cancelled_before_it_pauses_a_replica_leaves_no_call_behind(replicas):
    async def body(manager):
        manager.add_replica(replicas("only"))
        syncing = asyncio.create_task(manager.sync(plain().items(), 1))
        await asyncio.sleep(0)
        syncing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await syncing

    run(MAKE["ipc"](), body)
    gc.collect()  # Python warns of a coroutine that nobody awaited when it goes, and pytest fails then


class Lonely:
    """A group on devices whose other members do not come, as NCCL has it: the first broadcast makes the group."""

    def broadcast(self, tensors, options):
        return self

    def is_completed(self):
        return False


def test_members_of_a_group_on_devices_meet_before_its_first_bucket(monkeypatch):
    """In a thread and within the deadline: in the broadcast of a bucket, the event loop would wait without one."""
    platform = SimpleNamespace(torch_device=lambda index: torch.device("cpu"), device_group=lambda *asked: Lonely())
    monkeypatch.setattr(collective, "current_platform", lambda: platform)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with pytest.raises(RuntimeError, match="not all members joined within 1 s"):
        collective._Group("group", torch.distributed.HashStore(), "nccl", 0, 2, "127.0.0.1", 0.5)


def test_a_group_that_is_never_made_does_not_keep_the_process_alive():
    """NCCL waits for members without a deadline, inside a library."""
    program = """
import asyncio, threading
from hone.weights.transports.collective import _beside

async def main():
    try:
        async with asyncio.timeout(0.1):
            await _beside(lambda: threading.Event().wait())
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "given up\n", done.stderr
