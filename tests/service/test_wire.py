"""The protobuf messages byte by byte, and their limits."""

import numpy as np
import pyarrow as pa
import pytest

from hone.processes.listening import BodyRefused, decompressed
from hone.service.protocol.refusals import BadRequest
from hone.service.protocol.wire import (
    MESSAGES,
    Sampled,
    SampledSequence,
    read_training,
    sampling_reply,
    training_reply,
)


def field(number, payload):
    """A length-delimited field as it is on the wire."""
    return bytes([number << 3 | 2, len(payload)]) + payload


def ints(*values, dtype="<i4"):
    return np.array(values, dtype).tobytes()


def tensor(values, dtype, *shape):
    return field(1, values) + bytes([3 << 3, dtype]) + field(4, bytes(shape))


def datum(tokens, **inputs):
    chunk = field(1, field(1, field(1, ints(*tokens))))
    return chunk + b"".join(field(2, field(1, name.encode()) + field(2, one)) for name, one in inputs.items())


def body(*data, loss=b"ppo", more=b""):
    return field(1, b"m:1") + bytes([2 << 3, 7]) + b"".join(field(3, one) for one in data) + field(4, loss) + more


def test_a_request_is_read_from_its_bytes():
    targets = tensor(ints(6, 7, dtype="<i8"), 2, 2)
    weights = tensor(np.array([0.5, 1], "<f4").tobytes(), 1, 2)
    settings = field(7, field(1, b"clip") + field(2, bytes([1 << 3 | 1]) + np.array([0.25]).tobytes()))
    found = read_training(body(datum([5, 6], target_tokens=targets, weights=weights), more=settings), 100)
    assert (found.model_id, found.seq_id, found.loss, found.settings, found.forward_only) == (
        "m:1",
        7,
        "ppo",
        {"clip": 0.25},
        False,
    )
    (one,) = found.data
    assert one.tokens.tolist() == [5, 6]
    assert one.inputs["target_tokens"].tolist() == [6, 7]
    assert one.inputs["weights"].tolist() == [0.5, 1]


def test_a_sparse_tensor_is_filled_with_zeros():
    csr = field(1, ints(8, 9, dtype="<i8")) + field(2, ints(0, 1, 2, dtype="<i8")) + field(3, ints(1, 0, dtype="<i8"))
    sparse = field(2, csr) + bytes([3 << 3, 2]) + field(4, bytes([2, 3]))
    (one,) = read_training(body(datum([5, 6], target_tokens=sparse)), 100).data
    assert one.inputs["target_tokens"].tolist() == [[0, 8, 0], [9, 0, 0]]


@pytest.mark.parametrize(
    ("csr", "shape"),
    [
        ((ints(8, dtype="<i8"), ints(0, 1, 1, dtype="<i8"), ints(3, dtype="<i8")), [2, 3]),  # a column too far
        ((ints(8, dtype="<i8"), ints(0, 2, 1, dtype="<i8"), ints(1, dtype="<i8")), [2, 3]),  # rows that go back
        ((ints(8, dtype="<i8"), ints(0, 1, dtype="<i8"), ints(1, dtype="<i8")), [2, 3]),  # a row too few
        ((ints(8, dtype="<i8"), ints(0, 1, 1, dtype="<i8"), ints(-1, dtype="<i8")), [2, 3]),
    ],
)
def test_a_broken_sparse_tensor_is_refused(csr, shape):
    sparse = (
        field(2, b"".join(field(n + 1, one) for n, one in enumerate(csr))) + bytes([24, 2]) + field(4, bytes(shape))
    )
    with pytest.raises(BadRequest, match="no valid CSR"):
        read_training(body(datum([5, 6], target_tokens=sparse)), 100)


def test_a_few_bytes_cannot_ask_for_much_memory():
    csr = field(1, b"") + field(2, ints(0, dtype="<i8")) + field(3, b"")
    million = b"\x80\x80\x80\x80\x10"  # 2 ** 32 as a varint
    sparse = field(2, csr) + bytes([24, 2]) + field(4, million * 2)
    with pytest.raises(BadRequest, match="dense_elements"):
        read_training(body(datum([5, 6], target_tokens=sparse)), 1000)
    packed = pa.Codec("zstd").compress(b"\0" * (1 << 22), asbytes=True)
    assert len(packed) < 1000
    with pytest.raises(BodyRefused, match="after decompression"):
        decompressed(packed, "zstd", 1 << 20)


def test_zstd_is_undone_and_other_encodings_are_refused():
    assert decompressed(pa.Codec("zstd").compress(b"abc" * 9, asbytes=True), "zstd", 100) == b"abc" * 9
    with pytest.raises(BodyRefused, match="gzip"):
        decompressed(b"", "gzip", 100)
    with pytest.raises(BodyRefused, match="zstd"):
        decompressed(b"not compressed", "zstd", 100)


def test_images_and_empty_requests_are_refused_by_name():
    image = field(1, field(2, field(1, b"png"))) + field(2, field(1, b"target_tokens") + field(2, b""))
    with pytest.raises(BadRequest, match="image"):
        read_training(body(image), 100)
    with pytest.raises(BadRequest, match="data is empty"):
        read_training(body(), 100)
    with pytest.raises(BadRequest, match="protobuf"):
        read_training(b"\xff\xff", 100)


def test_two_ways_to_write_one_request_are_the_same_request():
    ones = {
        "weights": tensor(np.ones(2, "<f4").tobytes(), 1, 2),
        "target_tokens": tensor(ints(6, 7, dtype="<i8"), 2, 2),
    }
    turned = dict(reversed(ones.items()))
    first, second = (read_training(body(datum([5, 6], **one)), 100) for one in (ones, turned))
    assert first.canonical == second.canonical


def test_a_reply_has_a_record_for_each_run_of_equal_widths():
    rows = [np.array([-1, -2], np.float32), np.array([-3], np.float32), np.ones((2, 3), np.float32)]
    message = MESSAGES["ForwardBackwardOutput"]()
    message.ParseFromString(training_reply(rows, {"loss:sum": 1.5}))
    first, second = message.loss_fn_outputs
    assert np.frombuffer(first.fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(first.fields["logprobs"].data, "<f4").tolist() == [-1, -2, -3]
    assert (first.num_datums, second.num_datums, list(second.fields["logprobs"].trailing_shape)) == (2, 1, [3])
    assert dict(message.metrics) == {"loss:sum": 1.5}


def test_a_sample_has_its_tokens_and_why_it_ended():
    likely = np.array([[3, 4]], np.int32), np.array([[-1, -2]], np.float32)
    found = Sampled([SampledSequence([7], [-0.5], True, likely)], np.array([np.nan, -1], np.float32))
    message = MESSAGES["SampleResponse"]()
    message.ParseFromString(sampling_reply(found))
    (one,) = message.sequences
    assert (one.stop_reason, one.tokens, one.topk_sampled_logprobs.k) == (0, ints(7), 2)
    assert np.isnan(np.frombuffer(message.prompt_logprobs, "<f4")[0])
    assert not message.HasField("topk_prompt_logprobs")
