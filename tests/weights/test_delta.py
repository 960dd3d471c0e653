"""Changes only: bit for bit, on the right base, and whole where that is less or the base is missing."""

import asyncio
import json

import pytest
import torch

from hone.weights.base import Arrival, Intake, WeightSyncError
from hone.weights.digests.digest import digest_tensors, new_digest
from hone.weights.sync import CheckpointEngineManager
from hone.weights.transports import delta
from hone.weights.transports.delta import (
    HEAD,
    INDEX,
    MASK,
    TAIL,
    VALUE,
    DeltaEngine,
    DeltaReceiver,
    _Base,
    _changes,
    _Encoder,
)
from tests.weights.conftest import every_kind
from tests.weights.receiving import TOKEN


def test_few_changes_travel_as_positions_many_as_bits_and_most_as_the_whole():
    before = torch.zeros(1000)
    for changed, kinds, size in ((0, [INDEX, VALUE], 0), (3, [INDEX, VALUE], 24), (100, [MASK, VALUE], 525)):
        new = before.clone()
        new[:changed] = 1
        sent = dict(_changes("w", before, new))
        assert [name.removeprefix("w") for name in sent] == kinds
        assert sum(t.numel() * t.element_size() for t in sent.values()) == size
    new = before + 1
    assert [name for name, _ in _changes("w", before, new)] == ["w"]


def encoded(weights, base=None):
    encoder = _Encoder(weights.items(), base)
    return list(encoder.stream()), encoder


class Carried:
    """A transport that has brought the tensors already."""

    def __init__(self, stream):
        self._stream = stream

    def stream(self, intake):
        return (Arrival([item], 1, 0) for item in self._stream)

    def finalize(self, failure="", digest=""):
        pass


def decoded(stream, version=1):
    """What a receiver in this process makes of a stream; it keeps its copy as `DeltaReceiver` does."""
    receiver = DeltaReceiver.__new__(DeltaReceiver)
    receiver._carrier, receiver._tensors, receiver.rank = Carried(stream), {}, 0
    receiver.offer = type("Offered", (), {"version": version, "replica": "r0"})
    taken = new_digest("bytes")
    out = {name: one.clone() for came in receiver.stream(Intake(taken)) for name, one in came.tensors}
    receiver.finalize("", receiver.expected)
    assert receiver.expected == taken.hexdigest() == digest_tensors(out.items(), "bytes")
    return out


def test_changes_of_every_kind_are_bit_exact():
    delta._kept.clear()
    first = {name: t.detach().contiguous().clone() for name, t in every_kind().items()}
    stream, encoder = encoded(first)
    decoded(stream)
    base = _Base(next(iter(delta._kept)), encoder.tensors, 0)
    second = {name: t.contiguous().clone() for name, t in first.items()}
    for tensor in second.values():
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8)[-1] ^= 1
    second["huge"][3, 4], second["huge"][0, 0], first["huge"][0, 1] = float("nan"), -0.0, 0.0
    stream, _ = encoded(second, base)
    assert json.loads(bytes(stream[0][1].tolist())) == {"base": base.name}
    assert {name.partition("\0")[1] + name.partition("\0")[2] for name, _ in stream} >= {INDEX, VALUE, HEAD, TAIL}
    out = decoded(stream, 2)
    assert digest_tensors(out.items()) == digest_tensors(second.items())
    delta._kept.clear()


def test_changes_are_never_applied_to_another_base():
    delta._kept.clear()
    weights = {"w": torch.zeros(100)}
    stream, encoder = encoded(weights)
    decoded(stream)
    (name,) = delta._kept
    changed = {"w": torch.ones(100).clone()}
    changed["w"][1:] = 0
    stream, _ = encoded(changed, _Base(name, encoder.tensors, 0))
    for held in ({}, {"1:other": {"w": torch.zeros(100)}}):
        delta._kept.clear()
        delta._kept.update(held)
        with pytest.raises(WeightSyncError, match=f"was sent changes of {name}, it holds"):
            decoded(stream, 2)
        assert delta._kept == {}
    delta._kept[name] = {"w": torch.zeros(3)}
    with pytest.raises(WeightSyncError, match=r"reach beyond|another size"):
        decoded([stream[0], ("w" + INDEX, torch.tensor([50])), ("w" + VALUE, torch.tensor([1], dtype=torch.int32))])
    with pytest.raises(WeightSyncError, match=r"no earlier version|was sent changes"):
        decoded([stream[0], ("v" + INDEX, torch.tensor([0])), ("v" + VALUE, torch.tensor([1], dtype=torch.int32))])


@pytest.mark.parametrize("over", ["ipc", "collective"])
def test_anchors_come_at_first_periodically_and_for_who_missed_one(over, replicas):
    first, second = replicas("r0"), replicas("r1")
    weights = {f"layer.{i}": torch.randn(64, 64) for i in range(4)}
    whole = 4 * 64 * 64 * 4
    sizes = []

    async def body():
        engine = DeltaEngine(1 << 14, 30, TOKEN, over=over, anchor_every=3)
        manager = CheckpointEngineManager(engine)

        async def sync(version):
            weights["layer.2"][version, :3] += 1
            metrics = await manager.sync(weights.items(), version)
            sizes.append(metrics["weights/bytes"].value >= whole)
            assert metrics["weights/tensors"].value == 4

        manager.add_replica(first)
        for version in range(1, 6):
            await sync(version)
        assert sizes == [True, False, False, True, False]
        manager.add_replica(second)  # holds nothing
        await sync(6)
        await sync(7)
        assert sizes[5:] == [True, False]
        second.fault = "raises:2"
        with pytest.raises(WeightSyncError):
            await sync(8)
        second.fault = ""
        manager.add_replica(second)
        if "r0" not in manager.versions:  # a broadcast loses all of its members
            manager.add_replica(first)
        await sync(9)  # the one that failed holds nothing that is whole
        await sync(10)
        assert sizes[7:] == [True, False]
        await engine.close()

    asyncio.run(body())


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="delta cannot use the transport disk"):
        DeltaEngine(1 << 14, 30, TOKEN, over="disk")
    with pytest.raises(ValueError, match="anchor_every should be at least 1, found 0"):
        DeltaEngine(1 << 14, 30, TOKEN, anchor_every=0)
