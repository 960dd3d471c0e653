"""Every training rank sends to the receivers on its device: ranks and receivers are processes, the test drives."""

import os
import re
import signal

import pytest
import torch

from hone.weights.base import WeightSyncError
from hone.weights.digests.digest import digest_tensors
from hone.weights.digests.packed import size_of
from hone.weights.transports.bucketed.channel import Peer
from hone.weights.transports.ipc.by_rank import assign
from hone.weights.transports.ipc.rank_sender import OpenSender, RankLocation
from tests.weights.receiving import TOKEN
from tests.weights.sending import Gathered, Ranks, run, weights_of


@pytest.fixture
def doomed(tmp_path):
    """Two ranks of one test, which ends one of them."""
    made = Ranks(["gpu-0", "gpu-1"], tmp_path / "store")
    yield made
    made.close()


def pids(ranks):
    return [process.pid for process in ranks.processes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_sends_to_the_receivers_on_its_device(ranks, replicas, dtype):
    """Two replicas of tensor parallel 2 on four devices; a server sees both of its own, each rank its own first."""
    four = ranks(4)
    high = replicas("high", ranks=2, devices=[("gpu-2", "gpu-3"), ("gpu-3", "gpu-2")])
    low = replicas("low", ranks=2, devices=[("gpu-0", "gpu-1"), ("gpu-1", "gpu-0")])

    async def body(manager, engine):
        manager.add_replica(high)
        manager.add_replica(low)
        buckets = []
        for version in (1, 2):
            expected = weights_of(version, dtype)
            metrics = await manager.sync(Gathered(four, version, dtype), version)
            assert high.facts == low.facts == {name: (str(dtype), (48, 64)) for name in expected}
            assert metrics["weights/bytes"].value == sum(size_of(one) for one in expected.values())
            assert metrics["weights/senders"].value == 4
            assert [pid for pid, _ in low.senders + high.senders] == pids(four)
            buckets.append([name for _, name in low.senders + high.senders])
        assert buckets[0] == buckets[1]  # mapped once
        assert len(set(buckets[0])) == 4
        assert manager.versions == {"high": 2, "low": 2}
        assert four.orders == ["Locate", "OpenSender", "SendStream"] * 2

    run(body)


def test_every_rank_sends_all_bytes_once_however_many_receivers_it_has(ranks, replicas):
    two = ranks(2)
    made = [replicas(f"r{n}", devices=[(f"gpu-{n % 2}",)]) for n in range(4)]

    async def body(manager, engine):
        for one in made:
            manager.add_replica(one)
        sent = []
        send = engine.send_weights

        async def noted(*given):
            sent.append(await send(*given))
            return sent[-1]

        engine.send_weights = noted
        await manager.sync(Gathered(two, 1), 1)
        size = 8 * 48 * 64 * 4
        assert sent[0].by_rank == {0: size, 1: size}
        assert sent[0].bytes == size
        assert sent[0].digest == digest_tensors(weights_of(1).items(), "bytes")
        assert [one.senders[0][0] for one in made] == pids(two) * 2

    run(body)


def test_a_rank_without_receivers_gathers_too_and_replicas_come_and_go(ranks, replicas):
    two = ranks(2)
    first, second = replicas("r0", devices=[("gpu-1",)]), replicas("r1", devices=[("gpu-0",)])

    async def body(manager, engine):
        manager.add_replica(first)
        metrics = await manager.sync(Gathered(two, 1), 1)
        assert metrics["weights/senders"].value == 1
        assert first.senders[0][0] == pids(two)[1]
        manager.add_replica(second)
        await manager.sync(Gathered(two, 2), 2)
        assert [first.senders[0][0], second.senders[0][0]] == pids(two)[::-1]
        manager.remove_replica("r0")
        await manager.sync(Gathered(two, 3), 3)
        assert manager.versions == {"r1": 3}

    run(body)


def test_a_killed_receiver_loses_only_itself(ranks, replicas):
    """It was the only one of its rank, which gathers to the end for the others."""
    two = ranks(2)
    good, bad = replicas("good", devices=[("gpu-0",)]), replicas("bad", devices=[("gpu-1",)])
    bad.fault = "dies:3"

    async def body(manager, engine):
        manager.add_replica(good)
        manager.add_replica(bad)
        with pytest.raises(WeightSyncError, match="1 of 2 replicas: replica bad") as caught:
            await manager.sync(Gathered(two, 1), 1)
        assert caught.value.replicas == ("bad",)
        assert manager.versions == {"good": 1}
        bad.fault = ""
        bad.replace_rank()
        manager.add_replica(bad)
        await manager.sync(Gathered(two, 2), 2)
        assert manager.versions == {"good": 2, "bad": 2}

    run(body)


def test_a_replica_that_the_driver_drops_is_dropped_by_its_rank(ranks, replicas):
    """Its process stays connected and silent: without the driver's word, its rank would wait for 200 s."""
    two = ranks(2)
    good, bad = replicas("good", devices=[("gpu-0",)]), replicas("bad", devices=[("gpu-1",)])
    bad.fault = "stuck:3"

    async def body(manager, engine):
        manager.add_replica(good)
        manager.add_replica(bad)
        with pytest.raises(WeightSyncError, match="replica bad: RuntimeError: it is stuck"):
            await manager.sync(Gathered(two, 1), 1)
        assert manager.versions == {"good": 1}

    try:
        run(body, timeout_s=600)
    finally:
        os.kill(bad.processes[0].process.pid, signal.SIGKILL)


def test_receivers_that_are_lost_before_anything_is_sent_open_no_stream(ranks, replicas):
    two = ranks(2)
    replica = replicas("r0", token="another run's", devices=[("gpu-0",)])

    async def body(manager, engine):
        manager.add_replica(replica)
        with pytest.raises(WeightSyncError, match="replica r0"):
            await manager.sync(Gathered(two, 1), 1)
        assert two.orders == ["Locate"]

    run(body)


def test_ranks_that_gathered_different_weights_are_an_error_that_names_one(ranks, replicas):
    two = ranks(2)
    made = [replicas(f"r{n}", devices=[(f"gpu-{n}",)]) for n in range(2)]

    async def body(manager, engine):
        for one in made:
            manager.add_replica(one)
        digest = digest_tensors(weights_of(1).items(), "bytes")
        with pytest.raises(WeightSyncError, match=f"training rank 1 sent .* digest .*rank 0 sent {digest}"):
            await manager.sync(Gathered(two, 1, fault="differs:1"), 1)
        assert manager.versions == {}
        assert all("resume" not in one.asked for one in made)

    run(body)


def test_a_rank_that_is_killed_ends_the_sync_and_leaves_no_folder(doomed, replicas):
    made = [replicas(f"r{n}", devices=[(f"gpu-{n}",)]) for n in range(2)]

    async def body(manager, engine):
        for one in made:
            manager.add_replica(one)
        with pytest.raises(RuntimeError, match=r"rank [01]: "):
            await manager.sync(Gathered(doomed, 1, fault="dies:1"), 1)
        assert manager.versions == {}
        assert all(one.asked[-1].startswith("stop: ") for one in made)

    run(body)


def test_what_is_not_on_ranks_is_sent_by_the_driver(ranks, replicas):
    two, replica = ranks(2), replicas("r0", devices=[("gpu-0",)])

    async def body(manager, engine):
        manager.add_replica(replica)
        metrics = await manager.sync(weights_of(1).items(), 1)
        assert replica.senders[0][0] == os.getpid()
        assert metrics["weights/senders"].value == 1
        await manager.sync(Gathered(two, 2), 2)
        assert replica.senders[0][0] == pids(two)[0]
        assert manager.versions == {"r0": 2}

    run(body)


def test_no_order_shows_its_token_and_it_is_not_the_runs(ranks, replicas):
    two, replica, seen = ranks(2), replicas("r0", devices=[("gpu-0",)]), []

    class Noted(Gathered):
        def order(self, order):
            seen.append(order)
            return super().order(order)

    async def body(manager, engine):
        manager.add_replica(replica)
        await manager.sync(Noted(two, 1), 1)

    run(body)
    (opening,) = [order for order in seen if isinstance(order, OpenSender)]
    assert re.fullmatch("[0-9a-f]{64}", opening.token)
    assert opening.token not in repr(opening)
    assert all(TOKEN not in str(order) for order in seen)


# ------------------------------------------------------------------------------------------------------ who sends


def peers(*facts):
    made = []
    for number, (own, seen) in enumerate(facts):
        made.append(Peer(f"r{number}", 0))
        made[-1].facts = {"device": own, "devices": seen}
    return made


def places(*devices, here=True):
    return [RankLocation(here, 0, device, False) for device in devices]


def test_a_receiver_goes_to_its_device_then_to_one_it_sees_then_to_the_first():
    there = peers(("", []), ("c", ["c", "b"]), ("b", ["b"]), ("x", ["x"]), ("a", ["a"]))
    chosen = assign(there, places("a", "b"))
    assert [chosen[peer] for peer in there] == [0, 1, 1, 0, 0]


def test_receivers_without_devices_share_one_sender_which_is_here():
    there = peers(*[("", [])] * 6)
    assert list(assign(there, places("", "")).values()) == [0] * 6
    ranks = [*places("", here=False), *places("", "")]
    assert list(assign(there, ranks).values()) == [1] * 6


def test_ranks_of_another_machine_leave_the_work_to_the_driver(replicas):
    replica = replicas("r0")

    class Elsewhere(Gathered):
        def __iter__(self):
            return iter(weights_of(1).items())

        def order(self, order):
            return [{"here": False, "process": 1, "device": "", "shares": False}] * 2

    async def body(manager, engine):
        manager.add_replica(replica)
        await manager.sync(Elsewhere(None, 1), 1)
        assert replica.senders[0][0] == os.getpid()

    run(body)
