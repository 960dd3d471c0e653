"""The protobuf messages of the protocol, from their field numbers, by the `protobuf` runtime.

    bytes --read_training--> TrainingRequest of numpy arrays
    arrays --training_reply, sampling_reply--> bytes

Text is JSON elsewhere; only these three messages are protobuf. Numbers, types and names are those of the public schema
of tinker 0.25 to 0.38 (package `tinker_public`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from hone.service.protocol.refusals import BadRequest
from hone.workers.tenants.work import Datum

PACKAGE = "hone_service"
SCALARS = {"string": 9, "int32": 5, "int64": 3, "bytes": 12, "double": 1, "bool": 8}
# message -> "number type name"; `*` before the type: repeated; "map KEY VALUE"; `?`: a member of the oneof `kind`
SCHEMA: Mapping[str, tuple[str, ...]] = {
    "EncodedText": ("1 bytes tokens",),
    "Image": ("1 bytes data", "2 string format", "3 int32 expected_tokens"),
    "Dmel": ("1 bytes dmel",),
    "Chunk": ("1 ?EncodedText encoded_text", "2 ?Image image", "3 ?Dmel dmel"),
    "SparseCsr": ("1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"),
    "Tensor": ("1 ?bytes dense", "2 ?SparseCsr sparse_csr", "3 int32 dtype", "4 *int64 shape"),
    "Provenance": ("1 string sequence_id", "2 int64 offset", "3 int64 length"),
    "ProvenanceSpan": ("1 ?Provenance prompt_tokens", "2 ?Provenance sampled_tokens"),
    "Datum": (
        "1 *Chunk model_input",
        "2 map:string:Tensor loss_fn_inputs",
        "3 *ProvenanceSpan model_input_spans",
        "4 *ProvenanceSpan loss_fn_input_spans",
    ),
    "LossConfigValue": ("1 ?double number", "2 ?string text"),
    "ForwardBackwardRequest": (
        "1 string model_id",
        "2 int32 seq_id",
        "3 *Datum data",
        "4 string loss_fn",
        "5 map:string:double loss_fn_config",
        "6 bool forward_only",
        "7 map:string:LossConfigValue loss_fn_config_v2",
    ),
    "BatchedTensor": ("1 bytes data", "2 bytes offsets", "3 int32 dtype", "4 *int64 trailing_shape"),
    "ArrayRecord": ("1 string type_tag", "2 map:string:BatchedTensor fields", "3 int64 num_datums"),
    "ForwardBackwardOutput": (
        "1 string loss_fn_output_type",
        "2 *ArrayRecord loss_fn_outputs",
        "3 map:string:double metrics",
    ),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 int32 k", "4 int32 length"),
    "SampledSequence": (
        "1 int32 stop_reason",
        "2 bytes tokens",
        "3 bytes logprobs",
        "4 TopkLogprobs topk_sampled_logprobs",
    ),
    "PromptAltTokens": ("1 Tensor tokens", "2 Tensor logprobs"),
    "SampleResponse": (
        "1 *SampledSequence sequences",
        "2 bytes prompt_logprobs",
        "3 TopkLogprobs topk_prompt_logprobs",
        "4 int32 prompt_cache_hit_tokens",
        "5 Tensor target_prompt_logprobs",
        "6 PromptAltTokens prompt_alt_tokens",
    ),
}
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
NUMPY: Mapping[int, str] = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4"}
STOP, LENGTH = 0, 1


def _messages() -> dict[str, Any]:
    """Message classes by name."""
    proto = descriptor_pb2.FileDescriptorProto(name="hone/service/tinker.proto", package=PACKAGE, syntax="proto3")
    for name, fields in SCHEMA.items():
        _add_message(proto.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in SCHEMA}


def _add_message(message: Any, fields: Sequence[str]) -> None:
    for line in fields:
        number, kind, name = line.split()
        repeated, member = kind.startswith("*"), kind.startswith("?")
        kind = kind.lstrip("*?")
        if kind.startswith("map:"):
            _, key, value = kind.split(":")
            entry = "".join(part.title() for part in name.split("_")) + "Entry"
            nested = message.nested_type.add(name=entry)
            nested.options.map_entry = True
            _add_message(nested, (f"1 {key} key", f"2 {value} value"))
            repeated, kind = True, f"{message.name}.{entry}"
        added = message.field.add(name=name, number=int(number), label=3 if repeated else 1)
        if kind in SCALARS:
            added.type = SCALARS[kind]
        else:
            added.type, added.type_name = 11, f".{PACKAGE}.{kind}"
        if member:
            if not message.oneof_decl:
                message.oneof_decl.add(name="kind")
            added.oneof_index = 0


MESSAGES = _messages()


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """A `forward_backward` request."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool
    canonical: bytes = field(repr=False)  # the same bytes for the same request, however a client wrote its maps


def training_message(body: bytes) -> Any:
    """A `forward_backward` request as it came. Raises BadRequest if it is none."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is no ForwardBackwardRequest of protobuf: {error}") from error
    return message


def read_training(body: bytes, most_elements: int) -> TrainingRequest:
    """Parse a `forward_backward` request. Raises BadRequest, naming the datum and the field, for what is not valid."""
    message = training_message(body)
    if not message.data:
        raise BadRequest("data is empty: send one datum or more")
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("kind") == "text" else value.number
    left, data = most_elements, []
    for number, datum in enumerate(message.data):
        found, used = _read_datum(datum, f"data[{number}]", left)
        left -= used
        data.append(found)
    return TrainingRequest(
        message.model_id,
        message.seq_id,
        tuple(data),
        message.loss_fn,
        settings,
        message.forward_only,
        message.SerializeToString(deterministic=True),
    )


def _read_datum(datum: Any, where: str, left: int) -> tuple[Datum, int]:
    pieces = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("kind")
        if kind != "encoded_text":
            raise BadRequest(f"{where}.model_input has a chunk of kind {kind}: only encoded_text is served here")
        if len(chunk.encoded_text.tokens) % 4:
            raise BadRequest(
                f"{where}.model_input: tokens should be int32, found {len(chunk.encoded_text.tokens)} bytes"
            )
        pieces.append(np.frombuffer(chunk.encoded_text.tokens, "<i4").astype(np.int64))
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    if not len(tokens):
        raise BadRequest(f"{where}.model_input has no tokens")
    inputs, used = {}, len(tokens)
    for name, tensor in datum.loss_fn_inputs.items():
        inputs[name] = read_tensor(tensor, f"{where}.loss_fn_inputs[{name!r}]", left - used)
        used += inputs[name].size
    return Datum(tokens, inputs), used


def read_tensor(tensor: Any, where: str, most: int) -> NDArray[Any]:
    """A dense array of at most `most` elements; what a sparse tensor does not list is 0. Raises BadRequest."""
    if tensor.dtype not in NUMPY:
        raise BadRequest(f"{where} has the dtype {tensor.dtype}; expected 1 (float32) or 2 (int64)")
    shape = tuple(tensor.shape)
    size = int(np.prod(np.array(shape, dtype=object), initial=1))
    if any(length < 0 for length in shape) or size > most:
        raise BadRequest(f"{where} has the shape {list(shape)}: a request may have limits.dense_elements numbers", 413)
    if tensor.WhichOneof("kind") == "sparse_csr":
        return _densified(tensor, where, shape)
    found = _numbers(tensor.dense, NUMPY[tensor.dtype], where)
    if not shape:
        shape, size = (len(found),), len(found)
    if len(found) != size:
        raise BadRequest(f"{where} has {len(found)} numbers, and its shape {list(shape)} has {size}")
    return found.reshape(shape)


def _densified(tensor: Any, where: str, shape: tuple[int, ...]) -> NDArray[Any]:
    csr = tensor.sparse_csr
    values = _numbers(csr.values, NUMPY[tensor.dtype], where)
    rows, columns = (_numbers(one, "<i8", where) for one in (csr.crow_indices, csr.col_indices))
    if len(shape) != 2:
        raise BadRequest(f"{where} is sparse and has the shape {list(shape)}; expected two dimensions")
    return filled(np.zeros(shape, values.dtype), rows, columns, values, where)


def filled(
    dense: NDArray[Any], rows: NDArray[np.int64], columns: NDArray[np.int64], values: NDArray[Any], where: str
) -> NDArray[Any]:
    """Write the values of a CSR tensor into an array [N, K] of what it does not list. Raises BadRequest."""
    counts, shape = np.diff(rows), dense.shape
    fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not fits or (counts < 0).any() or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise BadRequest(f"{where} is no valid CSR tensor of the shape {list(shape)}")
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _numbers(data: bytes, dtype: str, where: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadRequest(f"{where} has {len(data)} bytes, which is no whole number of its dtype")
    return np.frombuffer(data, dtype)


def training_reply(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: each datum's log-probs, [N] or [N, K], and metrics called `name:reduction`."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    runs: list[list[NDArray[np.float32]]] = []
    for one in logprobs:
        if not runs or runs[-1][-1].shape[1:] != one.shape[1:]:
            runs.append([])
        runs[-1].append(one)
    for run in runs:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(run))
        batched = record.fields["logprobs"]
        offsets = np.cumsum([0, *(one.nbytes for one in run)], dtype="<i8")
        batched.data = b"".join(one.astype("<f4").tobytes() for one in run)
        batched.offsets, batched.dtype = offsets.tobytes(), FLOAT32
        batched.trailing_shape.extend(run[0].shape[1:])
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool  # False: the limit of tokens ended it
    likely: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None  # [n, k] ids and log-probs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a sampling request."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: NDArray[np.float32] | None = None  # [len], NaN where there is none
    prompt_likely: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None  # [len, k]
    targets: NDArray[np.float32] | None = None  # [len - 1, K]
    alternatives: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None  # [len - 1, k] each


def sampling_reply(found: Sampled) -> bytes:
    """A SampleResponse."""
    message = MESSAGES["SampleResponse"]()
    for one in found.sequences:
        added = message.sequences.add(stop_reason=STOP if one.stopped else LENGTH)
        added.tokens = np.asarray(one.tokens, "<i4").tobytes()
        added.logprobs = np.asarray(one.logprobs, "<f4").tobytes()
        if one.likely is not None:
            _write_likely(added.topk_sampled_logprobs, one.likely)
    if found.prompt_logprobs is not None:
        message.prompt_logprobs = found.prompt_logprobs.astype("<f4").tobytes()
    if found.prompt_likely is not None:
        _write_likely(message.topk_prompt_logprobs, found.prompt_likely)
    if found.targets is not None:
        _write_tensor(message.target_prompt_logprobs, found.targets)
    if found.alternatives is not None:
        ids, logprobs = found.alternatives
        _write_tensor(message.prompt_alt_tokens.tokens, ids)
        _write_tensor(message.prompt_alt_tokens.logprobs, logprobs)
    return bytes(message.SerializeToString())


def _write_likely(message: Any, found: tuple[NDArray[np.int32], NDArray[np.float32]]) -> None:
    ids, logprobs = found
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()
    message.length, message.k = ids.shape


def _write_tensor(message: Any, array: NDArray[Any]) -> None:
    kind = INT64 if array.dtype.kind == "i" else FLOAT32
    message.dense, message.dtype = array.astype(NUMPY[kind]).tobytes(), kind
    message.shape.extend(array.shape)
