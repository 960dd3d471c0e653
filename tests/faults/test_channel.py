"""Faults planted in the code that moves weights, each of which must be caught before anything is served."""

import asyncio

import pytest
import torch

from hone.weights.base import Sent, WeightSyncError
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports.disk import DiskEngine
from hone.weights.transports.ipc.engine import IpcEngine
from tests.weights.receiving import TOKEN

BUCKET = 1 << 14


def weights():
    return {f"layer.{i}": torch.randn(40, 64) for i in range(5)}


def fails(engine, replica, message):
    async def whole():
        manager = CheckpointEngineManager(engine)
        manager.add_replica(replica)
        try:
            with pytest.raises(WeightSyncError, match=message):
                await manager.sync(weights().items(), 1)
        finally:
            await engine.close()
        assert replica.asked[-1].startswith("stop: ")
        assert "resume" not in replica.asked
        assert manager.versions == {}

    asyncio.run(whole())


class FlipsABit(IpcEngine):
    """After the digest was taken, one bit of the third bucket changes."""

    async def _ship(self, number, filled, last):
        if number == 2 and filled.groups:
            self._bucket(number)[5000] ^= 4
        await super()._ship(number, filled, last)


class SkipsATensor(IpcEngine):
    async def _ship(self, number, filled, last):
        groups = filled.groups[:-1] if number == 2 else filled.groups
        await super()._ship(number, filled._replace(groups=groups), last)


class SendsABucketTwice(IpcEngine):
    async def _ship(self, number, filled, last):
        await super()._ship(number, filled, last)
        if number == 1 and last:
            await super()._ship(number, filled, last)


class ForgetsABucket(IpcEngine):
    async def _ship(self, number, filled, last):
        if number != 1:
            await super()._ship(number, filled, last)


class EndsInTheMiddle(IpcEngine):
    """Half of the update, and then the end, as if that had been all."""

    async def send_weights(self, weights, version):
        return await super().send_weights(list(weights)[:2], version)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (FlipsABit, "it was changed on the way"),
        (SkipsATensor, "4 tensors with .* came, the sender counted 5"),
        (SendsABucketTwice, "bucket 1 came where bucket 2 was due"),
        (ForgetsABucket, "bucket 2 came where bucket 1 was due"),
    ],
)
def test_planted_faults_of_the_sender(fault, message, replicas):
    fails(fault(BUCKET, 20, TOKEN), replicas("r0"), message)


def test_half_of_an_update_is_not_a_whole_one(replicas):
    """The half is whole in itself; what shows it is a receiver that holds more than was sent."""
    replica = replicas("r0")

    async def whole():
        engine = IpcEngine(BUCKET, 20, TOKEN)
        manager = CheckpointEngineManager(engine)
        manager.add_replica(replica)
        await manager.sync(weights().items(), 1)
        await engine.close()

    asyncio.run(whole())
    replica.asked.clear()
    fails(EndsInTheMiddle(BUCKET, 20, TOKEN), replica, "a tensor was lost, stale or changed on the way")


class Damages(DiskEngine):
    """A file is damaged between the two sides."""

    where = -1

    async def send_weights(self, weights, version):
        part = self._place / "part-00001.safetensors"
        sent = await super().send_weights(weights, version)
        data = bytearray(part.read_bytes())
        data[self.where] ^= 1
        part.write_bytes(data)
        return sent


class DamagesTheHead(Damages):
    where = 3


class ForgesTheManifest(DiskEngine):
    async def send_weights(self, weights, version):
        place = self._place
        sent = await super().send_weights(weights, version)
        text = (place / "manifest.json").read_text()
        (place / "manifest.json").write_text(text.replace('"version": 1', '"version": 2'))
        return sent


class NamesAnotherVersion(DiskEngine):
    async def send_weights(self, weights, version):
        sent = await super().send_weights(weights, version + 1)
        return Sent(version, sent.digest, sent.tensors, sent.bytes)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Damages, "it was changed on the way"),
        (DamagesTheHead, "part-00001.safetensors cannot be read"),
        (ForgesTheManifest, "not written by a sender that knows this run's token"),
        (NamesAnotherVersion, "is of weight version 2, asked was for 1"),
    ],
)
def test_planted_faults_on_disk(fault, message, replicas, tmp_path):
    fails(fault(BUCKET, 20, TOKEN, tmp_path), replicas("r0"), message)


def test_a_replica_that_answers_for_fewer_ranks_is_stopped(replicas):
    replica = replicas("r0", ranks=2)
    receive = replica.receive_weights

    async def half(offer):
        return (await receive(offer))[:1]

    replica.receive_weights = half
    fails(IpcEngine(BUCKET, 20, TOKEN), replica, "1 of its 2 ranks acknowledged version 1")


def test_a_sender_without_memory_for_its_buckets_stops_who_is_paused(replicas):
    replica = replicas("r0")

    async def whole():
        engine = IpcEngine(1 << 50, 20, TOKEN)
        manager = CheckpointEngineManager(engine)
        manager.add_replica(replica)
        try:
            with pytest.raises(WeightSyncError, match=r"choose a smaller weights\.bucket_mib"):
                await manager.sync(weights().items(), 1)
        finally:
            await engine.close()
        assert replica.asked[-1].startswith("stop: the sender failed: no memory for 2 buckets")

    asyncio.run(whole())
