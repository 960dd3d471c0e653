"""What is said on the channel: who is believed, and what is refused."""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import zmq

from hone.weights.base import Full, Intake, Offer, WeightSyncError
from hone.weights.digests.digest import digest_tensors, new_digest
from hone.weights.digests.packed import size_of
from hone.weights.transports.bucketed.buckets import Packer, Unpacker
from hone.weights.transports.bucketed.channel import ReceiverChannel, SenderChannel
from hone.weights.transports.bucketed.wire import LARGEST_MESSAGE, BrokenMessage, decode, encode, lock
from hone.weights.transports.ipc.engine import IpcEngine
from hone.weights.transports.ipc.memory import SharedBuffers, open_buffers

TOKEN = "a token for tests"


@pytest.mark.parametrize("body", [b"\x80\x04", b"[1]", b"{}", b'{"type": 3}', b"x" * 3, b'{"type": "a"'])
def test_what_is_not_a_message_is_refused(body):
    with pytest.raises(BrokenMessage, match="message"):
        decode(body)


def test_a_message_of_several_parts_is_refused():
    assert decode(encode({"type": "a"})) == {"type": "a"}
    with pytest.raises(BrokenMessage, match="a message of 2 parts; expected one"):
        decode(encode({"type": "a"}), b"")


def test_a_message_that_is_too_large_is_refused_on_both_sides():
    with pytest.raises(BrokenMessage, match="the largest is"):
        decode(b" " * (LARGEST_MESSAGE + 1))
    with pytest.raises(WeightSyncError, match="the largest is"):
        encode({"type": "a", "pieces": "x" * LARGEST_MESSAGE})


def test_an_empty_token_locks_nothing():
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, pytest.raises(WeightSyncError) as refused:
        lock(dealer, "", "receiver")
    assert "token is empty" in str(refused.value)


OFFER = {"format": 2, "transport": "ipc", "version": 3, "payload": {"kind": "full"}, "timeout_s": 5.0, "replica": "r"}
OFFER["address"] = {}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
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


def group(begin, *tensors, start=0, length=32):
    """How a message describes tensors that lie side by side from a byte on, or a piece of one."""
    return [begin, json.dumps([tensors, start, length])]


GOOD = group(0, ["w", "float32", [2, 4]])


@pytest.mark.parametrize(
    "wrong",
    [
        "w",
        [0],
        [0, 7],
        [0, "w"],
        [0, "[]"],
        [0, '[[["w", "float32", [2, 4]]], 0]'],
        group(0),
        group(0, ["w", "float32"]),
        group(0, [3, "float32", [2, 4]]),
        group(0, ["w" * 2000, "float32", [2, 4]]),
        group(0, ["w", "float31", [2, 4]]),
        group(0, ["w", "float32", [2, -4]]),
        group(0, ["w", "float32", [2, True]]),
        group(0, ["w", "float32", [2, 4.0]]),
        group(0, ["w", "float32", 8]),
        group(1, ["w", "float32", [2, 4]]),
        group(64, ["w", "float32", [2, 4]]),
        group(-2048, ["w", "float32", [2, 4]]),
        group(True, ["w", "float32", [2, 4]]),
        group(2048, ["w", "float32", [2, 4]], length=4096),
        group(4096, ["w", "float32", [2, 4]]),
        group(0, ["w", "float32", [2, 800]], length=6400),
        group(0, ["w", "float32", [2, 4]], start=8),
        group(0, ["w", "float32", [2, 4]], start=True),
        group(0, ["w", "float32", [2, 4]], length=-32),
        group(0, ["w", "float32", [2, 4]], length=0),
        group(0, ["w", "float32", [2, 4]], start=16, length=16),
        group(0, ["v", "float32", [2, 4]], ["w", "float32", [2, 4]], length=32),
        group(0, ["v", "float32", [2, 4]], ["w", "float32", [2, 4]], length=2048),
        group(0, ["v", "float32", [2, 4]], ["w", "float32", [2, 4]], length=16),
        group(0, ["w", "float32", [1 << 60]]),
    ],
)
def test_a_description_that_does_not_fit_its_bucket_is_refused(wrong):
    bucket = torch.zeros(4096, dtype=torch.uint8)
    assert names(Unpacker().read(bucket, [GOOD])) == ["w"]
    with pytest.raises(BrokenMessage):
        list(Unpacker().read(bucket, [wrong]))


def names(arrivals):
    return [name for came in arrivals for name, _ in came.tensors]


def test_pieces_out_of_order_and_ends_that_do_not_add_up_are_refused():
    bucket, w, v = torch.zeros(64, dtype=torch.uint8), ["w", "uint8", [128]], ["v", "uint8", [128]]
    first, second = group(0, w, length=64), group(0, w, start=64, length=64)
    unpacker = Unpacker()
    assert list(unpacker.read(bucket, [first])) == []
    with pytest.raises(BrokenMessage, match="in the middle of 'w'"):
        unpacker.finish(1, 128)
    assert [tuple(one.shape) for came in unpacker.read(bucket, [second]) for _, one in came.tensors] == [(128,)]
    with pytest.raises(BrokenMessage, match="1 tensors with 128 bytes came, the sender counted 2"):
        unpacker.finish(2, 128)
    unpacker.finish(1, 128)
    for groups in ([second], [first, first], [first, group(0, v, start=64, length=64)], [first, group(0, v)]):
        with pytest.raises(BrokenMessage, match="where another was due"):
            list(Unpacker().read(bucket, groups))
    whole = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(BrokenMessage, match="a piece of 'w' lies apart from the one before"):
        list(Unpacker().read(whole, [first, group(2048, w, start=64, length=64)]))
    for twice in ([GOOD, GOOD], [group(0, *[["w", "float32", [2, 4]]] * 2, length=2080)]):
        with pytest.raises(BrokenMessage, match="'w' comes twice"):
            list(Unpacker().read(whole, twice))


async def filled(packer, *buckets):
    """What `packer` writes: (number of the bucket, groups of a part of it), as a sender goes on."""
    for number in itertools.count():
        bucket = buckets[number % len(buckets)]
        part = await packer.fill(bucket)
        if not part.groups:
            return
        while part.groups:
            yield bucket, part.groups
            part = await packer.fill(bucket, part.used)


def packed(weights, size, enough=1 << 40):
    """The groups in each part of each bucket, and where they are."""

    async def whole():
        packer, buckets = Packer(weights.items(), "bytes", enough), [torch.zeros(size, dtype=torch.uint8)] * 9
        return [[(begin, *json.loads(text)) for begin, text in groups] async for _, groups in filled(packer, *buckets)]

    return asyncio.run(whole())


def test_packing_places_small_tensors_together_and_cuts_only_large_ones():
    a, b, c, e = ["a", "float32", [10]], ["b", "uint8", [2500]], ["c", "float32", [1600]], ["e", "float32", [0]]
    weights = {
        "a": torch.zeros(10),
        "b": torch.zeros(2500, dtype=torch.uint8),
        "c": torch.zeros(1600),
        "e": torch.zeros(0),
    }
    assert packed(weights, 6144) == [
        [(0, [a, b], 0, 4548)],
        [(0, [c], 0, 6144)],
        [(0, [c], 6144, 256), (2048, [e], 0, 0)],
    ]
    assert packed(weights, 1 << 20) == [[(0, [a, b, c, e], 0, 14336)]]


def test_a_bucket_is_told_of_in_parts_and_a_large_tensor_goes_on_in_it():
    large, small, last = torch.zeros(600, 1024), torch.zeros(5), torch.zeros(7)
    found = packed({"small": small, "large": large, "last": last}, 1 << 22, enough=1 << 20)
    named = ["large", "float32", [600, 1024]]
    assert found == [
        [(0, [["small", "float32", [5]]], 0, 20), (2048, [named], 0, 1 << 20)],
        [(2048 + (1 << 20), [named], 1 << 20, 1 << 20)],
        [(2048 + (2 << 20), [named], 2 << 20, 360_448), (2_459_648, [["last", "float32", [7]]], 0, 28)],
    ]


def mixture():
    """Small ones in groups, one that is larger than a group, one that is larger than a bucket; strides and dtypes."""
    torch.manual_seed(0)
    weights = {
        f"s{i}": torch.randn(i % 7, 11 * i + 1).to(torch.bfloat16 if i % 3 else torch.float64) for i in range(200)
    }
    weights |= {"large": torch.randn(300, 500), "turned": torch.randn(400, 600).T, "cut": torch.randn(1_100_000)}
    weights |= {
        "steps": torch.arange(40)[::4],
        "last": torch.tensor(True),
        "learned": torch.randn(9, requires_grad=True),
    }
    weights |= {"conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(), "fits": torch.randn(200_000)}
    weights["negative"] = weights["conjugate"].imag
    return dict(sorted(weights.items()))


def through(weights, enough, **intake):
    """What comes out of buckets of 2 MiB that were full of something else; the digests of both sides; what came in the
    tensors that were given for it."""

    async def whole():
        packer, taken = Packer(weights.items(), "bytes", enough), new_digest("bytes")
        unpacker, found = Unpacker(Intake(taken, **intake)), {}
        buckets = [torch.full((2**21,), 255, dtype=torch.uint8) for _ in "01"]
        async for bucket, groups in filled(packer, *buckets):
            for came in unpacker.read(bucket, groups):
                tensors = dict(came.tensors)
                assert came.count == len(tensors)
                assert came.bytes == sum(size_of(one) for one in tensors.values())
                written.update(name for name, one in tensors.items() if one is intake.get("targets", {}).get(name))
                found |= tensors if intake.get("copy") else {name: one.clone() for name, one in tensors.items()}
        unpacker.finish(packer.tensors, packer.bytes)
        return found, packer.hexdigest(), taken.hexdigest(), written

    written = set()
    return asyncio.run(whole())


@pytest.mark.parametrize("enough", [1 << 40, 1 << 20, 1 << 14, 2048])
@pytest.mark.parametrize("intake", [{}, {"copy": True}])
def test_what_is_packed_together_comes_out_of_the_bucket_as_it_was(enough, intake):
    weights = mixture()
    found, sent, taken, _ = through(weights, enough, **intake)
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert sent == taken == digest_tensors(weights.items(), "bytes") == digest_tensors(found.items(), "bytes")


@pytest.mark.parametrize("enough", [1 << 40, 1 << 20])
@pytest.mark.parametrize("copy", [True, False])
def test_what_comes_is_written_into_the_tensors_that_are_like_it(enough, copy):
    weights = mixture()
    targets = {name: torch.empty(one.shape, dtype=one.dtype).fill_(1) for name, one in weights.items()}
    other = {"large": torch.zeros(500, 300), "s7": torch.zeros(7, 3), "cut": torch.zeros(1_100_000).double()}
    other |= {"fits": torch.zeros(400_000)[::2], "s20": torch.zeros(weights["s20"].shape[::-1]).bfloat16().T}
    other["s22"] = torch.zeros(weights["s22"].shape).half()
    before = {name: one.clone() for name, one in other.items()}
    targets |= other
    del targets["s3"]
    found, sent, taken, written = through(weights, enough, copy=copy, targets=targets)
    assert written == targets.keys() - other.keys()
    assert sent == taken == digest_tensors(weights.items(), "bytes")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    for name, target in targets.items():
        assert torch.equal(target, before[name] if name in other else weights[name]), name


def test_tensors_that_share_their_memory_get_what_came_last():
    """As a tied head in a receiver that has but one: what it then holds is not what came; its own digest says so."""
    head = torch.zeros(8, 4)
    targets = {"embedding": head, "head": head}
    weights = {"embedding": torch.ones(8, 4), "head": torch.full((8, 4), 2.0)}
    _, sent, taken, _ = through(weights, 1 << 20, targets=targets)
    assert sent == taken != digest_tensors(targets.items(), "bytes")
    assert head.eq(2).all()


# ------------------------------------------------------------------------------------------------- the channel


def meeting(tmp_path, talk, timeout_s=3.0):
    """A sender that expects r0/0, while `talk(address)` runs in a thread; what the sender lost."""

    async def whole():
        channel = SenderChannel("s1", 3, [("r0", 0)], TOKEN, timeout_s)
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
    """Garbage, an oversized frame, a hello without a rank, a message before the hello; then the one that is meant."""

    def talk(address):
        context = zmq.Context()
        noise = context.socket(zmq.DEALER)
        lock(noise, TOKEN, "receiver")
        noise.connect(address)
        hello = {"type": "hello", "session": "s1", "replica": "r0", "version": 3, "facts": {}}
        noise.send(b"\x80\x04pickle")
        noise.send_multipart([b"a", b"b", b"c"])
        noise.send(encode({**hello, "rank": "0"}))
        noise.send(encode({"type": "ready"}))
        noise.send(encode({**hello, "rank": 7}))
        for reason in ("a hello message whose rank is '0', expected int", "is not expected"):
            assert noise.poll(5000)
            assert reason in json.loads(noise.recv())["reason"]
        noise.send(b"x" * (LARGEST_MESSAGE + 1))
        said = joining(3, "r0", 20)(address)
        context.destroy(linger=0)
        return said

    assert meeting(tmp_path, talk, timeout_s=20) == ({}, "met")


WRONG = [None, True, 3, -1, 1.5, 10**30, "x", [3], [None], {"a": 1}]
FACTS = {"device": "", "devices": [], "mapped": ["a"], "backends": ["gloo"], "holds": "", "group": ""}
HELLO = {"type": "hello", "session": "s1", "replica": "r0", "rank": 7, "version": 3, "facts": FACTS}


def mutated(message):
    """Each message with one field missing or of another type, and the name of the field."""
    for name in message:
        yield name, {key: value for key, value in message.items() if key != name}
        yield from ((name, {**message, name: value}) for value in WRONG)


def test_each_malformed_hello_is_refused_with_one_line_and_the_listener_goes_on(tmp_path):
    hellos = [(name, hello) for name, hello in mutated(HELLO) if name != "type"]
    facts = [
        (name, some) for name, some in mutated(FACTS) if name in some and type(some[name]) is not type(FACTS[name])
    ]
    hellos += [(name, {**HELLO, "facts": some}) for name, some in facts]
    hellos += [("mapped", {**HELLO, "facts": {"mapped": [["a"]]}})]

    def talk(address):
        with zmq.Context() as context, context.socket(zmq.DEALER) as noise:
            lock(noise, TOKEN, "receiver")
            noise.connect(address)
            refused = []
            for _, hello in hellos:
                noise.send(encode(hello))
                assert noise.poll(5000)
                refused.append(json.loads(noise.recv()))
        return refused, joining(3, "r0", 20)(address)

    lost, (refused, said) = meeting(tmp_path, talk, timeout_s=20)
    assert (lost, said) == ({}, "met")
    for (name, hello), answer in zip(hellos, refused, strict=True):
        assert answer["type"] == "refused", hello
        reason = answer["reason"]
        valid = name not in hello or (name not in FACTS and type(hello[name]) is type(HELLO[name]))
        assert (f"a hello message whose {name} is" in reason) != (valid and name in hello), (hello, reason)
        assert "\n" not in reason
        assert len(reason) < 300


@pytest.mark.parametrize(
    "message",
    [
        {"type": "taken"},
        {"type": "taken", "bucket": "0"},
        {"type": "taken", "bucket": True},
        {"type": "failed"},
        {"type": "failed", "reason": 3},
        {"type": "x" * 1000},
        {"type": ["taken"]},
        [],
    ],
)
def test_a_malformed_message_costs_its_author_the_sync_and_nobody_else(tmp_path, message):
    async def whole():
        channel = SenderChannel("s1", 3, [("r0", 0), ("r1", 0)], TOKEN, 20)
        address = channel.bind(f"ipc://{tmp_path}/c")

        def talk():
            first, second = (ReceiverChannel(offer(3, name, 20), 0, TOKEN) for name in ("r0", "r1"))
            try:
                for one in (first, second):
                    one.connect(address, "s1", {})
                first._socket.send(json.dumps(message).encode())
                second.send({"type": "taken", "bucket": 0})
            finally:
                for one in (first, second):
                    one.close({"type": "done"})

        try:
            await asyncio.gather(channel.meet(), asyncio.to_thread(talk))
            await channel.until(lambda peer: peer.done, "take")
            return channel.lost(), [peer.taken for peer in channel.peers]
        finally:
            await channel.close()

    lost, taken = asyncio.run(whole())
    assert taken == [-1, 0]
    assert list(lost) == ["r0"]
    assert "\n" not in lost["r0"]
    assert len(lost["r0"]) < 200


MEMORY = {"type": "memory", "kind": "memory", "identity": "i", "size": 4096, "ticket": "00" * 16}


@pytest.mark.parametrize(
    "change",
    [
        *({"ticket": one} for one in (None, 3, "zz", "\ud800")),
        *({"size": one} for one in (None, -1, 1 << 80, "1", True)),
        *({"kind": one} for one in (None, "other")),
        {"kind": "device"},
        {"kind": "device", "handles": [[], []]},
        {"kind": "device", "handles": 3, "uuid": ""},
        {"kind": "device", "handles": [[], []], "uuid": []},
    ],
)
def test_memory_that_is_described_wrongly_is_one_error_and_opens_nothing(change):
    def opened(message):
        ours, theirs = socket.socketpair()
        shared = SharedBuffers(4096)
        with ours, theirs:
            socket.send_fds(theirs, [b"m"], shared.descriptors)
            ours.settimeout(5)
            try:
                return open_buffers(message, ours)
            finally:
                shared.close()

    def held():
        """Descriptors of such memory; threads of this process may open others meanwhile."""
        gc.collect()
        count = 0
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # one of those others, closed by now
                count += "hone-weights" in os.readlink(f"/proc/self/fd/{number}")
        return count

    before = held()
    with pytest.raises(BrokenMessage) as caught:
        opened({**MEMORY, **change, "identity": f"wrong {change}"})
    assert "\n" not in str(caught.value)
    assert held() <= before
    assert [one.numel() for one in opened({**MEMORY, "identity": "right"})] == [4096, 4096]


def test_a_rank_is_met_once(tmp_path):
    """A second connection that calls itself the same is refused, and changes nothing about the first."""

    def talk(address):
        first, second = (ReceiverChannel(offer(timeout_s=20), 0, TOKEN) for _ in "01")
        try:
            first.connect(address, "s1", {"device": "first"})
            with pytest.raises(WeightSyncError, match=r"rank 0 of replica 'r0' is not expected \(any more\)"):
                second.connect(address, "s1", {"device": "second"})
        finally:
            for one in (first, second):
                one.close({"type": "done"})

    assert meeting(tmp_path, talk, timeout_s=20) == ({}, None)


def test_connections_with_another_token_are_refused(tmp_path):
    """By ZeroMQ: the sender hears nothing of them."""

    def talk(address):
        strangers = [ReceiverChannel(offer(), 0, "another token") for _ in "012"]
        try:
            for one in strangers:
                with pytest.raises(WeightSyncError, match="does not know this run's token"):
                    one.connect(address, "s1", {})
        finally:
            for one in strangers:
                one.close({"type": "done"})
        return joining(3, "r0", 20)(address)

    assert meeting(tmp_path, talk, timeout_s=30) == ({}, "met")


STRANGER = """
import os, sys, time, zmq
from zmq.utils.monitor import recv_monitor_message
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.SNDTIMEO, 10_000)
monitor = socket.get_monitor_socket(zmq.EVENT_ALL)
socket.connect(sys.argv[1])
try:
    socket.send_multipart([b"x" * 2**19] * 512)
except zmq.Again:
    os._exit(0)  # refused before it could send: ZeroMQ has taken its pipe away
refused = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
until = time.monotonic() + 20
while time.monotonic() < until and monitor.poll(1000):
    if recv_monitor_message(monitor)["event"] & refused:
        os._exit(0)  # without waiting for what it has not sent
os._exit(3)
"""


def test_a_message_of_many_parts_costs_the_sender_no_memory_before_its_author_is_known(tmp_path):
    """256 MiB in parts of which each is short enough."""

    def resident_kib():
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    def talk(address):
        before = resident_kib()
        subprocess.run([sys.executable, "-c", STRANGER, address], timeout=60, check=True)
        after = resident_kib()
        return joining(3, "r0", 20)(address), after - before

    lost, (said, grown_kib) = meeting(tmp_path, talk, timeout_s=60)
    assert (lost, said) == ({}, "met")
    assert grown_kib < 64 << 10


@pytest.mark.parametrize("token", ["", "another token"])
def test_a_receiver_does_not_believe_a_sender_without_the_token(tmp_path, token):
    """One with another token, and one without any encryption."""
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    if token:
        lock(impostor, token, "sender")
    impostor.bind(f"ipc://{tmp_path}/i")
    channel = ReceiverChannel(offer(timeout_s=5.0), 0, TOKEN)
    try:
        with pytest.raises(WeightSyncError, match="does not know this run's token"):
            channel.connect(f"ipc://{tmp_path}/i", "s1", {})
        assert not impostor.poll(0)
    finally:
        channel.close({"type": "done"})
        context.destroy(linger=0)


# ------------------------------------------------------------------------------------- somebody between both sides


class Between:
    """Passes bytes between a receiver and the sender; `attack` changes the receiver's message of this number."""

    def __init__(self, folder, address, attack=None, number=1):
        self.address = f"ipc://{folder}/between"
        self.sent = b""  # by the receiver
        self._attack, self._number = attack, number
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{folder}/between")
        self._listening.listen()
        self._to = address.removeprefix("ipc://")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with self._listening:
            receiver, _ = self._listening.accept()
        with receiver, socket.socket(socket.AF_UNIX) as sender, receiver.makefile("rb") as stream:
            sender.connect(self._to)
            back = threading.Thread(target=self._copy, args=(sender, receiver), daemon=True)
            back.start()
            with contextlib.suppress(OSError, EOFError):
                self._pass(stream, sender)
            for one in (receiver, sender):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            back.join(10)

    def _copy(self, sender, receiver):
        with contextlib.suppress(OSError):
            while data := sender.recv(1 << 16):
                receiver.sendall(data)
            receiver.shutdown(socket.SHUT_RDWR)

    def _pass(self, receiver, sender):
        """A greeting of 64 bytes, then frames: flags, size (8 bytes with flag 2), body (ZMTP 3.1)."""
        for _ in range(64):  # each side sends the rest of its greeting when it has seen the other's beginning
            self._write(sender, read(receiver, 1))
        messages = 0
        while True:
            flags = read(receiver, 1)
            size = int.from_bytes(read(receiver, 8 if flags[0] & 2 else 1), "big")
            body = read(receiver, size)
            frames = [body]
            if body.startswith(b"\x07MESSAGE"):
                if messages == self._number and self._attack is not None:
                    frames = self._attack(body)
                messages += 1
            for one in frames:
                length = len(one).to_bytes(8 if flags[0] & 2 else 1, "big")
                self._write(sender, flags + length + one)

    def _write(self, sender, data):
        self.sent += data
        sender.sendall(data)


def read(stream, size):
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


ATTACKS = {
    "a bit is changed": lambda body: [body[:-1] + bytes([body[-1] ^ 1])],
    "its number is changed": lambda body: [body[:15] + bytes([body[15] ^ 2]) + body[16:]],
    "it is cut": lambda body: [body[:-1]],
    "it comes twice": lambda body: [body, body],
    "another comes first": lambda body: [body[:8] + bytes(8) + body[16:], body],
}


async def attacked(folder, attack):
    """The sender's record of a receiver whose second message, `ready`, is attacked; `taken` follows it."""
    folder.mkdir()
    channel = SenderChannel("s1", 3, [("r0", 0)], TOKEN, 20)
    between = Between(folder, channel.bind(f"ipc://{folder}/c"), attack)

    def talk():
        receiver = ReceiverChannel(offer(timeout_s=15.0), 0, TOKEN)
        try:
            receiver.connect(between.address, "s1", {})
            receiver.send({"type": "ready"})
            receiver.send({"type": "taken", "bucket": 0})
            with pytest.raises(WeightSyncError, match="died while r0/0 waited"):
                receiver.receive("send")
        finally:
            receiver.close({"type": "done"})

    try:
        await asyncio.gather(channel.meet(), asyncio.to_thread(talk))
        return channel.peers[0]
    finally:
        await channel.close()


def test_a_message_that_is_attacked_on_its_way_ends_the_connection(tmp_path):
    async def all_of_them():
        return await asyncio.gather(*(attacked(tmp_path / str(n), one) for n, one in enumerate(ATTACKS.values())))

    peers = dict(zip(ATTACKS, asyncio.run(all_of_them()), strict=True))
    assert [name for name, peer in peers.items() if peer.ready] == ["it comes twice"], "the first was the receiver's"
    assert {(peer.taken, peer.done) for peer in peers.values()} == {(-1, False)}


def test_what_passes_between_them_unchanged_arrives(tmp_path):
    """Otherwise the attacks above would prove nothing. Repeated in another connection, the same bytes are nobody."""

    async def whole():
        channel = SenderChannel("s1", 3, [("r0", 0)], TOKEN, 20)
        between = Between(tmp_path, channel.bind(f"ipc://{tmp_path}/c"))

        def talk():
            receiver = ReceiverChannel(offer(timeout_s=15.0), 0, TOKEN)
            receiver.connect(between.address, "s1", {})
            receiver.send({"type": "taken", "bucket": 0})
            receiver.close({"type": "done"})

        try:
            await asyncio.gather(channel.meet(), asyncio.to_thread(talk))
            await channel.until(lambda peer: peer.done, "take")
            assert (channel.lost(), channel.peers[0].taken) == ({}, 0)
        finally:
            await channel.close()
        again = SenderChannel("s1", 3, [("r0", 0)], TOKEN, 20)
        address = again.bind(f"ipc://{tmp_path}/again")

        def replay():
            with socket.socket(socket.AF_UNIX) as copy:
                copy.settimeout(10)
                copy.connect(address.removeprefix("ipc://"))
                copy.sendall(between.sent)
                with contextlib.suppress(ConnectionResetError):
                    while copy.recv(1 << 16):  # until the sender ends the connection
                        pass
            return joining(3, "r0", 15)(address)

        try:
            _, said = await asyncio.gather(again.meet(), asyncio.to_thread(replay))
            assert said == "met", "the rank had not come yet"
        finally:
            await again.close()

    asyncio.run(whole())


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
