"""Receivers get the boxes of the weights that they need, from several ranks, and prove what they got."""

import pytest
import torch

from hone.models.parts.boxes import Boxed, from_text, nothing, to_text, whole
from hone.weights.base import WeightSyncError
from hone.weights.transports.bucketed.channel import Peer
from hone.weights.transports.ipc import by_rank
from hone.weights.transports.ipc.needs import boxes_of_ranks, complete
from hone.weights.transports.ipc.rank_sender import RankLocation
from tests.weights.layouts import OUTSIDE, LayoutReplica
from tests.weights.sending import LAYERS, ROWS, Gathered, run, weights_of

EACH = ROWS * 64  # elements of one tensor


@pytest.fixture
def layouts():
    """Makes replicas: `layouts("r0", "rows", [("gpu-0",), ("gpu-1",)])`."""
    made = []

    def make(*given):
        made.append(LayoutReplica(*given))
        return made[-1]

    yield make
    for replica in made:
        replica.close()


def on(*devices):
    return [(f"gpu-{device}",) for device in devices]


def noted(engine):
    """What the engine sends from now on."""
    sent, send = [], engine.send_weights

    async def note(*given):
        sent.append(await send(*given))
        return sent[-1]

    engine.send_weights = note
    return sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_the_first_sync_a_rank_gets_what_it_needs(ranks, layouts, dtype):
    two, replica = ranks(2), layouts("r0", "rows", on(0, 1))
    size = dtype.itemsize

    async def body(manager, engine):
        manager.add_replica(replica)
        sent = noted(engine)
        for version in (1, 2, 3):
            metrics = await manager.sync(Gathered(two, version, dtype), version)
            assert replica.held == replica.expected(weights_of(version, dtype))
            assert metrics["weights/bytes"].value == replica.bytes[0]
            assert sent[-1].tensors == LAYERS
        everything, parts = LAYERS * EACH * size, (LAYERS - 1) * EACH * size // 2 + EACH * size
        assert [one.by_rank for one in sent] == [{0: everything, 1: everything}, *[{0: parts, 1: parts}] * 2]
        assert replica.bytes == [parts, parts]
        assert replica.came[1]["layer.0"] == (ROWS // 2, 64)
        assert replica.came[1]["layer.1"] == (ROWS, 32)
        assert sent[1].digests["r0"][0] != sent[1].digests["r0"][1]

    run(body)


@pytest.mark.parametrize("layout", ["experts", "stages", "fused"])
def test_experts_stages_and_parts_of_fused_experts(ranks, layouts, layout):
    four, replica = ranks(4), layouts("r0", layout, on(0, 1, 2, 3))
    sizes = {
        "experts": [2, 3, 3, 3],  # layers; all ranks have the first
        "stages": [2, 2, 2, 2],
        "fused": [LAYERS / 2 * 48 / 64] * 4,  # half of the experts, from the gate's half to the up matrix's half
    }

    async def body(manager, engine):
        manager.add_replica(replica)
        sent = noted(engine)
        for version in (1, 2):
            await manager.sync(Gathered(four, version), version)
            assert replica.held == replica.expected(weights_of(version))
        assert sent[1].by_rank == {rank: layers * EACH * 4 for rank, layers in enumerate(sizes[layout])}

    run(body)


def test_replicas_of_different_layouts_are_served_in_one_sync(ranks, layouts):
    """One on devices of its own, two that share devices and so the smallest boxes around what both need."""
    four = ranks(4)
    made = [
        layouts("rows", "rows", on(0, 1)),
        layouts("experts", "experts", on(2, 3)),
        layouts("stages", "stages", on(2, 3)),
    ]

    async def body(manager, engine):
        for one in made:
            manager.add_replica(one)
        sent = noted(engine)
        for version in (1, 2, 3):
            await manager.sync(Gathered(four, version), version)
            for one in made:
                assert one.held == one.expected(weights_of(version))
        layers = {0: 4.5, 1: 4.5, 2: len({0, 2, 4, 6, 1, 3}), 3: len({0, 1, 3, 5, 7, 4, 6})}
        assert sent[2].by_rank == {rank: count * EACH * 4 for rank, count in layers.items()}
        assert made[1].bytes == made[2].bytes

    run(body)


def test_receivers_without_devices_get_different_boxes_from_different_ranks(ranks, layouts):
    """In the first sync one rank's buckets serve all; then each box has a sender of its own."""
    two = ranks(2)
    made = [layouts(f"r{number}", "rows", [(), ()]) for number in range(2)]

    async def body(manager, engine):
        for one in made:
            manager.add_replica(one)
        sent = noted(engine)
        for version in (1, 2):
            await manager.sync(Gathered(two, version), version)
            for one in made:
                assert one.held == one.expected(weights_of(version))
        assert [list(one.by_rank) for one in sent] == [[0], [0, 1]]
        assert made[0].bytes == made[1].bytes == [EACH * 4 * 9 // 2] * 2

    run(body)


def test_a_restarted_receiver_gets_everything_again(ranks, layouts):
    two, replica = ranks(2), layouts("r0", "rows", on(0, 1))

    async def body(manager, engine):
        manager.add_replica(replica)
        sent = noted(engine)
        await manager.sync(Gathered(two, 1), 1)
        await manager.sync(Gathered(two, 2), 2)
        replica.replace_rank()
        for version in (3, 4):
            await manager.sync(Gathered(two, version), version)
            assert replica.held == replica.expected(weights_of(version))
        part, everything = EACH * 4 * 9 // 2, EACH * 4 * LAYERS
        assert [list(one.by_rank.values()) for one in sent[1:]] == [[part, part], [part, everything], [part, part]]

    run(body)


def test_a_loader_that_reads_outside_its_box_is_an_error_and_then_gets_everything(ranks, layouts):
    two, replica = ranks(2), layouts("r0", "rows", on(0, 1))

    async def body(manager, engine):
        manager.add_replica(replica)
        sent = noted(engine)
        await manager.sync(Gathered(two, 1), 1)
        replica.fault = OUTSIDE
        with pytest.raises(WeightSyncError, match=r"OutsideBox: the loader reads .* of layer.4 \[48, 64\], of which"):
            await manager.sync(Gathered(two, 2), 2)
        assert manager.versions == {}
        manager.add_replica(replica)
        await manager.sync(Gathered(two, 3), 3)
        assert replica.came[1]["layer.4"] == (ROWS, 64)
        assert sent[-1].by_rank[1] == EACH * 4 * LAYERS

    run(body)


def test_what_the_ranks_of_a_replica_need_only_a_part_of_comes_whole(ranks, layouts):
    """Without it, nobody could say that the boxes are the whole model. What no rank needs is sent to nobody."""
    two, replica = ranks(2), layouts("r0", "leaky", on(0, 1))

    async def body(manager, engine):
        manager.add_replica(replica)
        for version in (1, 2):
            await manager.sync(Gathered(two, version), version)
            assert replica.held == replica.expected(weights_of(version))
        for came in replica.came:
            assert came["layer.2"] == (ROWS, 64)
            assert came["layer.6"] == (0, 0)
            assert came["layer.4"] == (ROWS // 2, 64)

    run(body)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other boxes:1", "it was changed on the way"),
        ("leaves out:1", "training rank 1 sent weights with tensors 7 .*, rank 0 sent 8"),
        ("tears:1", "it was changed on the way"),
    ],
)
def test_wrong_missing_and_torn_boxes_are_found(ranks, layouts, fault, message):
    two, replica = ranks(2), layouts("r0", "rows", on(0, 1))

    async def body(manager, engine):
        manager.add_replica(replica)
        await manager.sync(Gathered(two, 1), 1)
        with pytest.raises(WeightSyncError, match=message):
            await manager.sync(Gathered(two, 2, fault=fault), 2)
        assert manager.versions == {}

    run(body)


def test_ranks_that_send_the_same_boxes_with_different_values_are_an_error(ranks, layouts):
    two = ranks(2)
    made = [layouts(f"r{rank}", "rows", on(rank, rank)) for rank in range(2)]

    async def body(manager, engine):
        for one in made:
            manager.add_replica(one)
        await manager.sync(Gathered(two, 1), 1)
        with pytest.raises(WeightSyncError, match="training rank 1 sent weights with digest"):
            await manager.sync(Gathered(two, 2, fault="differs:1"), 2)

    run(body)


def test_the_receipt_of_each_rank_has_to_be_of_its_own_boxes(ranks, layouts):
    two, replica = ranks(2), layouts("r0", "rows", on(0, 1))
    receive = replica.receive_weights

    async def swapped(offer):
        return (await receive(offer))[::-1]

    async def body(manager, engine):
        manager.add_replica(replica)
        await manager.sync(Gathered(two, 1), 1)
        replica.receive_weights = swapped
        with pytest.raises(WeightSyncError, match="replica r0 serves weights with digest"):
            await manager.sync(Gathered(two, 2), 2)

    run(body)


# ------------------------------------------------------------------------------------------------------------- plans

HALVES = [Boxed((4, 6), ((0, 2), (0, 6))), Boxed((4, 6), ((2, 4), (0, 6)))]


def test_a_replica_needs_all_of_a_tensor_or_nothing():
    none = Boxed((4, 6), nothing((4, 6)))
    maps = [
        {"halves": HALVES[0], "gap": HALVES[0], "nobody": none, "shape": HALVES[0], "one": none},
        {"halves": HALVES[1], "gap": HALVES[0], "nobody": none, "shape": Boxed((4,), ((2, 4),)), "one": none},
    ]
    assert [set(one) for one in complete(maps)] == [{"halves", "nobody", "one"}] * 2
    maps[1].pop("one")  # that is, whole
    assert [set(one) for one in complete(maps)] == [{"halves", "nobody", "one"}, {"halves", "nobody"}]


def peer(replica, rank, text):
    made = Peer(replica, rank)
    made.facts = {"device": "", "devices": [], "wants": text}
    return made


def test_a_rank_sends_the_smallest_boxes_around_what_its_receivers_need():
    texts = [to_text({"w": one}) for one in HALVES]
    there = [peer("a", 0, texts[0]), peer("a", 1, texts[1]), peer("b", 0, texts[0]), peer("b", 1, texts[1])]
    wanted = {one: one.facts["wants"] for one in there}
    apart = dict(zip(there, [0, 1, 0, 1], strict=True))
    assert boxes_of_ranks(apart, wanted, 3) == (*texts, "")
    assert boxes_of_ranks(dict(zip(there, [0, 0, 1, 1], strict=True)), wanted, 2) == ("", "")
    wanted[there[1]] = ""
    assert boxes_of_ranks(apart, wanted, 2) == (texts[0], "")
    assert from_text(texts[0])["w"].box != whole((4, 6))


def test_receivers_that_need_the_same_share_a_sender():
    texts = [to_text({"w": one}) for one in HALVES]
    there = [peer(f"r{number}", 0, text) for number, text in enumerate([texts[0], "", texts[1], texts[0], texts[1]])]
    places = [RankLocation(True, 0, "", False)] * 3
    assert list(by_rank.assign(there, places).values()) == [0, 0, 1, 0, 1]
