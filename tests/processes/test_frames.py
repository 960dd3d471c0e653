"""Frames survive any cut; what is no frame, too long or too deep is refused before it is parsed."""

import datetime
import decimal
import json
import os
import time
import uuid

import pytest

from hone.processes.frames import HEADER, BrokenFrame, FrameReader, Kind, encode, encode_value


def test_frames_survive_any_cut():
    bodies = [{"a": 1}, {"text": "é\ud800 \n"}, {"big": "x" * 300}]
    stream = b"".join(encode(Kind.REPLY, batch, body) for batch, body in enumerate(bodies))
    for size in (1, 3, 7, len(stream)):
        reader = FrameReader()
        found = [frame for i in range(0, len(stream), size) for frame in reader.feed(stream[i : i + size])]
        assert [(frame.kind, frame.process, frame.batch, frame.body) for frame in found] == [
            (Kind.REPLY, os.getpid(), batch, body) for batch, body in enumerate(bodies)
        ]


def test_dates_durations_and_the_like_are_sent_as_text():
    value = [datetime.timedelta(days=1, hours=2), uuid.UUID(int=7), datetime.date(2026, 1, 2), decimal.Decimal("1.50")]
    assert json.loads(encode_value(value)) == ["1 day, 2:00:00", str(uuid.UUID(int=7)), "2026-01-02", "1.50"]


def raw(body, kind=Kind.REPLY):
    return HEADER.pack(len(body), kind, 1, 1) + body


@pytest.mark.parametrize(
    "data", [b"hello world, this is no frame", raw(b"[]"), raw(b"{]"), raw(b"\xff"), raw(b"{}", kind=9)]
)
def test_a_stream_that_is_not_frames_is_noticed(data):
    with pytest.raises(BrokenFrame):
        list(FrameReader().feed(data))


def test_whole_frames_before_a_broken_one_are_not_lost():
    reader = FrameReader()
    frames = reader.feed(raw(b'{"a": 1}') + raw(b'{"a": 2}') + raw(b"[]"))
    assert [next(frames).body, next(frames).body] == [{"a": 1}, {"a": 2}]
    with pytest.raises(BrokenFrame, match="is not an object"):
        next(frames)
    with pytest.raises(BrokenFrame, match="is not an object"):
        list(reader.feed(b""))


def test_a_frame_that_is_too_long_is_refused_when_it_is_announced():
    with pytest.raises(BrokenFrame, match="at most 100 are taken"):
        list(FrameReader(100).feed(HEADER.pack(101, Kind.REPLY, 1, 1)))


@pytest.mark.parametrize("deep", [b"[" * 400_000, b'{"a":' * 400_000, b'{"a":"' + b"[" * 2_000_000])
def test_a_frame_that_is_too_deep_is_refused_in_linear_time(deep):
    began = time.process_time()
    with pytest.raises(BrokenFrame):
        list(FrameReader().feed(raw(deep)))
    assert time.process_time() - began < 5  # 0.3 s; parsing ends in a RecursionError, backtracking in hours


def test_brackets_within_strings_are_not_depth():
    text = "{[" * 5000 + '\\"'
    (frame,) = FrameReader().feed(encode(Kind.REQUEST, 1, {"response": text, "row": [text]}))
    assert frame.body == {"response": text, "row": [text]}


def test_a_value_that_is_nested_too_deep_is_named_before_it_is_sent():
    value = "x"
    for _ in range(200):
        value = [value]
    (frame,) = FrameReader().feed(encode(Kind.REQUEST, 1, f'{{"items": [[{encode_value(value)}]]}}'))
    assert frame.body == {"items": [[value]]}
    for deeper in ([value], [[value]] * 2):
        with pytest.raises(TypeError, match="nested more than 200 levels deep"):
            encode_value(deeper)
    for _ in range(2000):
        value = [value]
    with pytest.raises(TypeError, match="nested more than 200 levels deep"):
        encode_value(value)
