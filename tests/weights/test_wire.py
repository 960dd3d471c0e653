"""What is said on the channel: who is believed, and what is refused."""

import asyncio
import json

import pytest
import torch
import zmq

from hone.models.digest import WeightDigest, digest_tensors
from hone.weights.base import Full, Offer, WeightSyncError
from hone.weights.buckets import Packer, Unpacker
from hone.weights.channel import ReceiverChannel, SenderChannel
from hone.weights.ipc import IpcEngine
from hone.weights.wire import LARGEST_MESSAGE, BrokenMessage, Secret, decode, encode

TOKEN = "a token for tests"
HELLO = {"type": "hello", "nonce": "aa", "replica": "r0", "rank": 0}


def pair(token=TOKEN, other=TOKEN):
    return Secret(token, HELLO, "bb"), Secret(other, HELLO, "bb")


def test_both_sides_prove_the_token_and_neither_can_echo_the_other():
    sender, receiver = pair()
    assert receiver.proves("sender", sender.proof("sender"))
    assert not receiver.proves("sender", receiver.proof("receiver"))
    assert not pair(other="x")[1].proves("sender", sender.proof("sender"))
    assert not Secret(TOKEN, HELLO, "cc").proves("sender", sender.proof("sender"))
    assert not receiver.proves("sender", None)
    assert not receiver.proves("sender", "ä")
    with pytest.raises(WeightSyncError, match="token is empty"):
        Secret("", HELLO, "bb")


def test_messages_arrive_once_in_order_unchanged_and_from_the_other_side():
    sender, receiver = (secret.channel(side) for secret, side in zip(pair(), ("sender", "receiver"), strict=True))
    first, second = sender.seal({"type": "a"}), sender.seal({"type": "b", "n": 1})
    with pytest.raises(BrokenMessage, match=r"message 0 .* out of order"):
        receiver.open(second)
    sender, receiver = (secret.channel(side) for secret, side in zip(pair(), ("sender", "receiver"), strict=True))
    first, second = sender.seal({"type": "a"}), sender.seal({"type": "b", "n": 1})
    assert receiver.open(first) == {"type": "a"}
    for wrong in (first, [second[0], second[1].replace(b"1", b"2")], [second[1]], [b"", second[1]]):
        with pytest.raises(BrokenMessage):
            receiver.open(wrong)
    sender, receiver = (secret.channel(side) for secret, side in zip(pair(), ("sender", "receiver"), strict=True))
    with pytest.raises(BrokenMessage):
        sender.open(sender.seal({"type": "a"}))


@pytest.mark.parametrize("body", [b"\x80\x04", b"[1]", b"{}", b'{"type": 3}', b"x" * 3, b'{"type": "a"'])
def test_what_is_not_a_message_is_refused(body):
    with pytest.raises(BrokenMessage, match="message"):
        decode(body)


def test_a_message_that_is_too_large_is_refused_on_both_sides():
    with pytest.raises(BrokenMessage, match="the largest is"):
        decode(b" " * (LARGEST_MESSAGE + 1))
    with pytest.raises(WeightSyncError, match="the largest is"):
        pair()[0].channel("sender").seal({"type": "a", "pieces": "x" * LARGEST_MESSAGE})


OFFER = {"format": 1, "transport": "ipc", "version": 3, "payload": {"kind": "full"}, "timeout_s": 5.0, "replica": "r"}
OFFER["address"] = {}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"version": "3"},
        {"version": True},
        {"payload": {"kind": "half"}},
        {"payload": {"kind": "adapter"}},
        {"timeout_s": None},
        {"address": []},
    ],
)
def test_an_offer_that_makes_no_sense_names_its_field(change):
    assert Offer.from_json(OFFER).payload == Full()
    with pytest.raises(WeightSyncError, match="offer"):
        Offer.from_json({**OFFER, **change})


# ---------------------------------------------------------------------------------------------- descriptions


GOOD = ["w", "float32", [2, 4], 0, 0, 32]


@pytest.mark.parametrize(
    "piece",
    [
        "w",
        ["w", "float32", [2, 4], 0, 0],
        [3, "float32", [2, 4], 0, 0, 32],
        ["w" * 2000, "float32", [2, 4], 0, 0, 32],
        ["w", "float31", [2, 4], 0, 0, 32],
        ["w", "float32", [2, -4], 0, 0, 32],
        ["w", "float32", [2, True], 0, 0, 32],
        ["w", "float32", [2, 4.0], 0, 0, 32],
        ["w", "float32", 8, 0, 0, 32],
        ["w", "float32", [2, 4], 1, 0, 32],
        ["w", "float32", [2, 4], 64, 0, 32],
        ["w", "float32", [2, 4], 2048, 0, 4096],
        ["w", "float32", [2, 4], 4096, 0, 32],
        ["w", "float32", [2, 800], 0, 0, 6400],
        ["w", "float32", [2, 4], 0, 8, 32],
        ["w", "float32", [2, 4], 0, 0, 0],
        ["w", "float32", [2, 4], 0, 16, 16],
        ["w", "float32", [1 << 60], 0, 0, 32],
    ],
)
def test_a_description_that_does_not_fit_its_bucket_is_refused(piece):
    bucket = torch.zeros(4096, dtype=torch.uint8)
    assert [name for some in Unpacker().read(bucket, [GOOD]) for name, _ in some] == ["w"]
    with pytest.raises(BrokenMessage):
        list(Unpacker().read(bucket, [piece]))


def test_pieces_out_of_order_and_ends_that_do_not_add_up_are_refused():
    bucket = torch.zeros(64, dtype=torch.uint8)
    first, second = ["w", "uint8", [128], 0, 0, 64], ["w", "uint8", [128], 0, 64, 64]
    unpacker = Unpacker()
    assert list(unpacker.read(bucket, [first])) == []
    with pytest.raises(BrokenMessage, match="in the middle of 'w'"):
        unpacker.finish(1, 128)
    assert [tuple(tensor.shape) for some in unpacker.read(bucket, [second]) for _, tensor in some] == [(128,)]
    with pytest.raises(BrokenMessage, match="1 tensors with 128 bytes came, the sender counted 2"):
        unpacker.finish(2, 128)
    unpacker.finish(1, 128)
    for pieces in ([second], [first, first], [first, ["v", "uint8", [128], 0, 64, 64]]):
        with pytest.raises(BrokenMessage, match="where another was due"):
            list(Unpacker().read(bucket, pieces))
    with pytest.raises(BrokenMessage, match="'w' comes twice"):
        list(Unpacker().read(torch.zeros(128, dtype=torch.uint8), [GOOD, GOOD]))


def test_packing_places_small_tensors_together_and_cuts_only_large_ones():
    weights = {
        "a": torch.zeros(10),
        "b": torch.zeros(2500, dtype=torch.uint8),
        "c": torch.zeros(1600),
        "e": torch.zeros(0),
    }

    async def packed():
        packer, bucket = Packer(weights.items()), torch.zeros(6144, dtype=torch.uint8)
        return [pieces for _ in range(4) if (pieces := await packer.fill(bucket))]

    assert asyncio.run(packed()) == [
        [["a", "float32", [10], 0, 0, 40], ["b", "uint8", [2500], 2048, 0, 2500]],
        [["c", "float32", [1600], 0, 0, 6144]],
        [["c", "float32", [1600], 0, 6144, 256], ["e", "float32", [0], 2048, 0, 0]],
    ]


def test_what_is_packed_together_comes_out_of_the_bucket_as_it_was():
    """Small ones in groups, one that is larger than a group, one that is larger than a bucket; strides and dtypes."""
    torch.manual_seed(0)
    weights = {
        f"s{i}": torch.randn(i % 7, 11 * i + 1).to(torch.bfloat16 if i % 3 else torch.float64) for i in range(200)
    }
    weights |= {"large": torch.randn(300, 500), "turned": torch.randn(400, 600).T, "cut": torch.randn(1_100_000)}
    weights |= {"steps": torch.arange(40)[::4], "last": torch.tensor(True)}
    weights = dict(sorted(weights.items()))

    async def through():
        packer, unpacker, bucket = Packer(weights.items()), Unpacker(), torch.zeros(2**21, dtype=torch.uint8)
        found = {}
        while pieces := await packer.fill(bucket):
            for group in unpacker.read(bucket, pieces):
                found |= {name: tensor.clone() for name, tensor in group}
        unpacker.finish(packer.tensors, packer.bytes)
        return found, packer.hexdigest()

    found, digest = asyncio.run(through())
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert digest == digest_tensors(weights.items()) == digest_tensors(found.items())


def test_what_a_bucket_held_before_is_no_part_of_the_next_tensors():
    """One larger than a group that ends within a row, and small ones, in a bucket that is full of something else."""
    weights = {"large": torch.randn(2**18 + 25), "small": torch.randn(7), "last": torch.randn(3, 5).half()}

    async def through():
        packer, unpacker = Packer(weights.items()), Unpacker()
        bucket = torch.full((2**21,), 255, dtype=torch.uint8)
        taken = WeightDigest()
        while pieces := await packer.fill(bucket):
            for some in unpacker.read(bucket, pieces):
                taken.add_packed(some)
        return packer.hexdigest(), taken.hexdigest()

    sent, taken = asyncio.run(through())
    assert sent == taken == digest_tensors(weights.items())


# ------------------------------------------------------------------------------------------------- the channel


def meeting(tmp_path, talk, timeout_s=1.0):
    """A sender that expects r0/0, while `talk(address)` runs in a thread; what the sender lost."""

    async def whole():
        channel = SenderChannel("s1", 3, {"r0": 1}, TOKEN, timeout_s)
        address = channel.bind(f"ipc://{tmp_path}/c")
        try:
            _, said = await asyncio.gather(channel.meet(), asyncio.to_thread(talk, address))
        finally:
            await channel.close()
        return channel.lost(), said

    return asyncio.run(whole())


def offer(version=3, replica="r0", timeout_s=1.0):
    return Offer("ipc", version, Full(), timeout_s, {}, replica)


def joining(*given, session="s1", rank=0):
    def talk(address):
        channel = ReceiverChannel(offer(*given), rank, TOKEN)
        try:
            channel.connect(address, session, {})
            return "met"
        except WeightSyncError as error:
            return str(error)
        finally:
            channel.close({"type": "done"})

    return talk


def test_the_expected_rank_is_met(tmp_path):
    assert meeting(tmp_path, joining(), timeout_s=20) == ({}, "met")


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        (joining(4), "at weight version 3, asked was for 4"),
        (joining(session="s0"), "at weight version 3"),
        (joining(3, "r1"), "rank 0 of replica 'r1' is not expected"),
        (joining(rank=1), "rank 1 of replica 'r0' is not expected"),
    ],
)
def test_others_are_refused_with_the_reason(tmp_path, talk, message):
    lost, said = meeting(tmp_path, talk)
    assert message in said
    assert "waited for r0/0 to come to receive weight version 3; it did not within 1 s" in lost["r0"]


def test_noise_does_not_keep_the_expected_rank_out(tmp_path):
    """Garbage, an oversized frame, a hello without a proof, a wrong proof; then the one that is meant."""

    def talk(address):
        context = zmq.Context()
        noise = context.socket(zmq.DEALER)
        noise.connect(address)
        hello = {**HELLO, "session": "s1", "version": 3, "facts": {}}
        noise.send(b"\x80\x04pickle")
        noise.send_multipart([b"a", b"b", b"c"])
        noise.send(encode({**hello, "rank": "0"}))
        noise.send(encode(hello))
        assert noise.poll(5000)
        challenge = json.loads(noise.recv())
        assert set(challenge) == {"type", "nonce", "proof"}
        noise.send(encode({"type": "proof", "proof": challenge["proof"]}))
        assert noise.poll(5000)
        assert "token" in json.loads(noise.recv())["reason"]
        noise.send(b"x" * (LARGEST_MESSAGE + 1))
        said = joining(3, "r0", 20)(address)
        context.destroy(linger=0)
        return said

    assert meeting(tmp_path, talk, timeout_s=20) == ({}, "met")


def test_a_receiver_does_not_believe_a_sender_without_the_token(tmp_path):
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.bind(f"ipc://{tmp_path}/i")
    channel = ReceiverChannel(offer(), 0, TOKEN)
    try:
        with pytest.raises(WeightSyncError, match="does not know this run's token"):
            asyncio.run(_answered(impostor, channel, f"ipc://{tmp_path}/i"))
    finally:
        channel.close({"type": "done"})
        context.destroy(linger=0)


async def _answered(impostor, channel, address):
    def answer():
        identity, _ = impostor.recv_multipart()
        impostor.send_multipart([identity, encode({"type": "challenge", "nonce": "cc", "proof": "00" * 32})])

    await asyncio.gather(asyncio.to_thread(answer), asyncio.to_thread(channel.connect, address, "s1", {}))


def test_a_receiver_alone_waits_no_longer_than_its_deadline(tmp_path):
    channel = ReceiverChannel(offer(timeout_s=0.3), 0, TOKEN)
    try:
        with pytest.raises(WeightSyncError, match=r"r0/0 waited for the sender to answer .*within 0.3 s"):
            channel.connect(f"ipc://{tmp_path}/nobody", "s1", {})
    finally:
        channel.close({"type": "done"})


def test_only_this_user_enters_the_folder_of_a_sender():
    async def whole():
        engine = IpcEngine(1 << 20, 5, TOKEN)
        engine.build_topology({"r0": 1})
        try:
            address = engine.prepare(1, Full()).address
            assert engine._folder.path.stat().st_mode & 0o777 == 0o700
            assert str(address["channel"]).startswith("ipc:///")
        finally:
            folder = engine._folder.path
            await engine.close()
        assert not folder.exists()

    asyncio.run(whole())
