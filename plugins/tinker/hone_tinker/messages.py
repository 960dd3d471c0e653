"""Requests and results of the protocol, as bytes of protobuf and as tensors.

The schema is that of `hone serve` (`hone.service.protocol.wire`): one list of field numbers for both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from hone.service.protocol.wire import FLOAT32, INT64, MESSAGES, NUMPY
from hone_tinker.connection import IS_IT_ONE, ServiceFailed

DATUMS, BYTES = 1024, 5_000_000  # most of one request, as the services' own client cuts it


@dataclass(frozen=True, slots=True)
class ServiceLoss:
    """A loss that a service computes: its name, its inputs for each token of a batch, and its settings."""

    name: str
    inputs: Mapping[str, Tensor]  # [T] or [T, K], `target_tokens` among them; the first place of a sequence is left out
    settings: Mapping[str, float] = field(default_factory=dict)

    def of(self, start: int, end: int) -> ServiceLoss:
        """The same loss of the tokens of one sequence."""
        return replace(self, inputs={name: values[start:end] for name, values in self.inputs.items()})


def cross_entropy(targets: Tensor, weights: Tensor) -> ServiceLoss:
    """The sum of -weight x log-prob of the targets, [T] or [T, K]."""
    return ServiceLoss("cross_entropy", {"target_tokens": targets, "weights": weights})


def training_requests(
    model_id: str, first_seq: int, sequences: Sequence[tuple[Tensor, ServiceLoss]], forward_only: bool
) -> list[bytes]:
    """Requests with numbers from `first_seq`; together they have all sequences, tokens and one loss, in order."""
    requests: list[bytes] = []
    message, size = None, 0
    for tokens, loss in sequences:
        datum = MESSAGES["Datum"]()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].numpy().astype("<i4").tobytes()
        for name, values in loss.inputs.items():
            _put(datum.loss_fn_inputs[name], values[1:].numpy(), FLOAT32 if values.is_floating_point() else INT64)
        if message is not None and (len(message.data) == DATUMS or size + datum.ByteSize() > BYTES):
            requests.append(message.SerializeToString())
            message = None
        if message is None:
            message, size = MESSAGES["ForwardBackwardRequest"](), 0
            message.model_id, message.seq_id = model_id, first_seq + len(requests)
            message.loss_fn, message.forward_only = loss.name, forward_only
            for name, value in loss.settings.items():
                message.loss_fn_config_v2[name].number = value
        message.data.append(datum)
        size += datum.ByteSize()
    if message is not None:
        requests.append(message.SerializeToString())
    return requests


def _put(tensor: Any, array: Any, kind: int) -> None:
    tensor.dense, tensor.dtype = array.astype(NUMPY[kind]).tobytes(), kind
    tensor.shape.extend(array.shape)


def read_logprobs(body: bytes) -> list[Tensor]:
    """The log-probs of each sequence's targets in a ForwardBackwardOutput, flat, float32. Raises ServiceFailed."""
    message = _parsed("ForwardBackwardOutput", body)
    rows: list[Tensor] = []
    for record in message.loss_fn_outputs:
        batched = record.fields["logprobs"]
        flat = torch.from_numpy(np.frombuffer(batched.data, "<f4").copy())
        ends = np.frombuffer(batched.offsets, "<i8") // 4
        rows += [flat[start:end] for start, end in pairwise(ends.tolist())]
    return rows


def sampling_request(tokens: Iterable[int], params: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The body of an `asample` request for one sequence."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
    return {"prompt": prompt, "num_samples": 1, "sampling_params": dict(params), **more}


@dataclass(frozen=True, slots=True)
class Answer:
    """The one sequence of a SampleResponse, and the scores of its prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool  # False: the limit of tokens ended it
    prompt_logprobs: Tensor | None  # [len], NaN for the first token
    prompt_top: tuple[Tensor, Tensor] | None  # [len, k] ids and log-probs


def _parsed(kind: str, body: Any) -> Any:
    """A message of protobuf. Raises ServiceFailed for bytes that are none, and for JSON."""
    try:
        return MESSAGES[kind].FromString(body)
    except (DecodeError, TypeError) as error:
        raise ServiceFailed(f"the service answered {body!r:.100} in the place of a {kind}; {IS_IT_ONE}") from error


def read_answer(body: bytes) -> Answer:
    """Raises ServiceFailed for anything else than a SampleResponse with one sequence."""
    message = _parsed("SampleResponse", body)
    if len(message.sequences) != 1:
        raise ServiceFailed(f"the service answered {len(message.sequences)} sequences, and one was asked for")
    (one,) = message.sequences
    top = None
    if message.HasField("topk_prompt_logprobs"):
        found = message.topk_prompt_logprobs
        shape = (found.length, found.k)
        ids = torch.from_numpy(np.frombuffer(found.token_ids, "<i4").copy()).view(shape)
        top = ids, torch.from_numpy(np.frombuffer(found.logprobs, "<f4").copy()).view(shape)
    scored = np.frombuffer(message.prompt_logprobs, "<f4").copy() if message.prompt_logprobs else None
    return Answer(
        tuple(np.frombuffer(one.tokens, "<i4").tolist()),
        tuple(np.frombuffer(one.logprobs, "<f4").tolist()),
        one.stop_reason == 0,
        None if scored is None else torch.from_numpy(scored),
        top,
    )
