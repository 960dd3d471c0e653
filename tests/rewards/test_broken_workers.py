"""A reward process that breaks the protocol fails the answer that it was about: no reward of 0, no wait, no end."""

import json
import struct

import pytest

from hone.processes.frames import FrameReader, Kind
from hone.processes.request_process import ChildLost
from hone.rewards.hosting.processes import Loaded
from hone.rewards.pool import _outcome
from hone.types import Status

BREAKS = '''
import gc, json, os, struct, time
from hone.processes.request_loop import RequestLoop

def breaks(response):
    """Write what the answer says into the socket of this process, in place of a value or before the end."""
    if not response.startswith("{"):
        return float(response)
    order = json.loads(response)
    (loop,) = (one for one in gc.get_objects() if isinstance(one, RequestLoop))
    data = bytes.fromhex(order.get("bytes", ""))
    if "reply" in order:
        body = order["reply"].encode()
        data = b"".join(struct.pack(">IBIQ", len(body), 4, os.getpid(), batch) + body for batch in range(1, 40))
    loop._socket.sendall(data)
    if order.get("dies"):
        os._exit(3)
    time.sleep(60)

def of_groups(responses):
    return breaks(responses[0])
'''

HEADER = struct.Struct(">IBIQ")
BODY = b'{"item": 0, "value": 0.0, "parts": {}, "seconds": 0.1}'


def raw(data, dies=False):
    return json.dumps({"bytes": data.hex(), "dies": dies})


def replying(body):
    return json.dumps({"reply": body})


PROCESSES = {  # what a process writes -> why its answer failed
    "half a header, then dead": (raw(b"\0\0\0", dies=True), "the reward process ended with exit status 3"),
    "a frame of 4 GB": (raw(HEADER.pack(2**32 - 1, 4, 1, 1)), "broke the protocol: a frame of kind 4 and 4294967295"),
    "text": (raw(b"Traceback (most recent call last):\n"), "broke the protocol: a frame of kind"),
    "no reply": (raw(HEADER.pack(2, 4, 1, 1) + b"[]"), "broke the protocol: a frame is not an object"),
    "a value beyond floats": (
        replying('{"item": 0, "parts": {}, "seconds": 1, "value": ' + "9" * 400 + "}"),
        "broke the protocol: OverflowError",
    ),
}

REPLIES = [
    '{"item": Infinity, "seconds": 1}',
    '{"item": 0, "seconds": 1}',
    '{"item": 0, "value": 0.0, "parts": {}}',
    '{"item": 0, "value": 0.0, "parts": {}, "seconds": null}',
    '{"item": 0, "value": 0.0, "parts": null, "seconds": 1}',
    '{"item": 0, "value": 0.0, "parts": {"a": 1' + "0" * 400 + '}, "seconds": 1}',
    '{"item": 0, "value": [0.0], "parts": {}, "seconds": 1}',
    '{"item": 0, "answers": [], "seconds": 1}',
    '{"item": 0, "answers": 3, "seconds": 1}',
    '{"item": 0, "answers": ["0"], "seconds": 1}',
    '{"value": 0.0, "parts": {}, "seconds": 1}',
]


HELLOS = [
    "{}",
    '{"concurrent": 3}',
    '{"concurrent": [3]}',
    '{"concurrent": {"a": 1}}',
    '{"concurrent": [], "whole_groups": "a"}',
    '{"concurrent": [], "needs_ground_truth": null}',
]

SAYS_HELLO = '''
"""Each time it is loaded it says hello by itself, with the text in `hello.json`, if that is there."""
import gc, os, pathlib
from hone.processes.frames import Kind
from hone.processes.request_loop import RequestLoop

def file():
    return pathlib.Path(__file__).with_name("hello.json")

if file().exists():
    (loop,) = (one for one in gc.get_objects() if isinstance(one, RequestLoop))
    text = file().read_text()
    file().unlink()
    loop._socket.sendall(__import__("struct").pack(">IBIQ", len(text), Kind.HELLO, os.getpid(), 0) + text.encode())

def dies(response):
    """An answer that holds text ends the process, and is what the next one says."""
    if response.startswith("{"):
        file().write_text(response)
        os._exit(3)
    return float(response)
'''


HALF = raw(HEADER.pack(len(BODY), 4, 1, 1) + BODY[:9])


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "breaks.py"
    path.write_text(BREAKS, encoding="utf-8")
    return lambda name, timeout_s=60: {"a": {"reward": f"{path}:{name}", "timeout_s": timeout_s}}


def test_each_process_fails_its_own_answer_only(score, group, broken):
    answers = [text for one, _ in PROCESSES.values() for text in (one, "0.25")]
    (scored,), metrics = score(broken("breaks"), [group(answers)])
    bad, fine = scored.trajectories[::2], scored.trajectories[1::2]
    assert [one.reward for one in fine] == [0.25] * len(PROCESSES)
    for one, (name, (_, reason)) in zip(bad, PROCESSES.items(), strict=True):
        assert one.status is Status.REWARD_FAILED, name
        assert reason in one.error, name
    assert metrics["reward/worker_restarts"] == len(PROCESSES)


def test_a_process_that_falls_silent_in_a_frame_is_not_waited_for(score, group, broken):
    (scored,), _ = score(broken("breaks", timeout_s=1), [group([HALF])])
    (one,) = scored.trajectories
    assert one.status is Status.REWARD_FAILED
    assert "no answer within 1 s" in one.error


def test_a_group_gets_as_many_values_as_it_has_answers(score, group, broken):
    """A single value, or one of three answers, is not everybody's."""
    one = '{"value": 1.0, "parts": {}}'
    asked = [replying('{"item": 0, "value": 0.0, "parts": {}, "seconds": 1}'),
             replying(f'{{"item": 0, "answers": [{one}], "seconds": 1}}'),
             replying(f'{{"item": 0, "answers": [{one}, {one}, {one}], "seconds": 1}}')]  # fmt: skip
    for answer in asked:
        (scored,), _ = score(broken("of_groups"), [group([answer, "1", "1"])])
        failed = [] if answer is asked[2] else [Status.REWARD_FAILED] * 3
        assert [one.status for one in scored.trajectories if not one.status.trainable] == failed
    assert [one.reward for one in scored.trajectories] == [1.0] * 3


def test_a_malformed_hello_is_refused_and_the_next_process_serves(score, group, tmp_path, caplog):
    path = tmp_path / "says_hello.py"
    path.write_text(SAYS_HELLO, encoding="utf-8")
    (scored,), metrics = score({"a": {"reward": f"{path}:dies"}}, [group([HELLOS[1], "0.5"])])
    dead, fine = scored.trajectories
    assert (dead.status, fine.reward) == (Status.REWARD_FAILED, 0.5)
    assert metrics["reward/worker_restarts"] == 2
    assert "could not be replaced: the reward process broke the protocol: lists of names were due" in caplog.text


@pytest.mark.parametrize("text", HELLOS)
def test_a_hello_that_lacks_something_is_the_end_of_its_process(text):
    with pytest.raises(ChildLost, match="the reward process broke the protocol: lists of names were due, found"):
        Loaded.of(json.loads(text))


@pytest.mark.parametrize("text", REPLIES)
def test_a_reply_that_lacks_something_is_the_end_of_its_process(text):
    body = text.encode()
    (frame,) = FrameReader().feed(HEADER.pack(len(body), Kind.REPLY, 1, 1) + body)
    with pytest.raises(ChildLost, match="the reward process broke the protocol"):
        _outcome(frame.body, timeout_s=1.0)
