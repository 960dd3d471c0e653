"""The answer to one sampling request: samples, and log-probs of the prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hone.service.protocol.messages import Sample, SamplingParameters, TensorData
from hone.service.protocol.refusals import BadRequest
from hone.service.protocol.wire import Sampled, SampledSequence, filled
from hone.types import Completion, GenerationRequest, SamplingParams, StopReason
from hone.workers.tenants.sampling import SnapshotRollout
from hone.workers.tenants.scores import drawn, likeliest, looked_up, whole
from hone.workers.tenants.served import MOST_LIKELY, ServedRollout

MOST_SCORES = 1 << 26  # numbers of the distributions that one request may need whole
Rollout = SnapshotRollout | ServedRollout
Likely = tuple[NDArray[np.int32], NDArray[np.float32]]


async def answer(rollout: Rollout, snapshot: str, message: Sample, seed: int, request_id: str, owner: str) -> Sampled:
    """Sample and score. Raises BadRequest or ValueError for a request that cannot be served."""
    prompt = message.prompt.tokens
    _check(rollout, message, prompt)
    sampling = replace(parameters(message.sampling_params, snapshot, rollout.longest - len(prompt)), cache_owner=owner)
    requests = [
        GenerationRequest(f"{request_id}:{number}", prompt, seeded(sampling, seed, number))
        for number in range(message.num_samples)
    ]
    completions = await asyncio.gather(*(rollout.generate(one) for one in requests))
    sequences = [await _sequence(rollout, snapshot, prompt, one, message.topk_sample_logprobs) for one in completions]
    found = Sampled(sequences)
    wants_all = message.target_prompt_logprobs is not None or message.prompt_alt_tokens_k
    if not (message.prompt_logprobs or message.topk_prompt_logprobs or wants_all):
        return found
    top = rollout.vocabulary if wants_all else message.topk_prompt_logprobs
    scores = await rollout.score(snapshot, prompt, top)
    skipped = len(prompt) - (message.prompt_logprobs_last_n or len(prompt) - 1)
    logprobs = scores.logprobs.float().cpu().numpy().copy()
    logprobs[:skipped] = np.nan
    ids, values = scores.top_ids.cpu().numpy(), scores.top_logprobs.float().cpu().numpy()
    every = whole(ids, values) if wants_all else None
    targets = message.target_prompt_logprobs
    return Sampled(
        sequences,
        logprobs if message.prompt_logprobs else None,
        likeliest(ids, values, message.topk_prompt_logprobs, skipped) if message.topk_prompt_logprobs else None,
        None if targets is None or every is None else _targets(targets, every),
        None
        if not message.prompt_alt_tokens_k or every is None
        else drawn(every, message.prompt_alt_tokens_k, message.sampling_params.temperature or 1.0, seed),
    )


def parameters(given: SamplingParameters, snapshot: str, room: int) -> SamplingParams:
    """The sampling of a request. An empty list of stops turns the end of sequence off too; others add to it."""
    stop = [given.stop] if isinstance(given.stop, str) else list(given.stop or ())
    return SamplingParams(
        max_tokens=max(1, room if given.max_tokens is None else given.max_tokens),
        temperature=given.temperature,
        top_k=max(0, given.top_k),
        top_p=given.top_p,
        stop=tuple(one for one in stop if isinstance(one, str)),
        stop_token_ids=tuple(one for one in stop if isinstance(one, int)),
        ignore_eos=given.stop == [],
        adapter=snapshot,
    )


def seeded(sampling: SamplingParams, seed: int, number: int) -> SamplingParams:
    """The sampling of one of a request's samples; the first has the request's own seed."""
    if number == 0:
        return replace(sampling, seed=seed % (1 << 63))
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)


def _check(rollout: Rollout, message: Sample, prompt: Sequence[int]) -> None:
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if (asked := getattr(message, name)) > MOST_LIKELY:
            raise BadRequest(f"{name} = {asked}: at most {MOST_LIKELY} are served")
    last = message.prompt_logprobs_last_n
    if last is not None and (not message.prompt_logprobs or last >= len(prompt)):
        raise BadRequest(
            f"prompt_logprobs_last_n = {last} needs prompt_logprobs, and should be 1 to {len(prompt) - 1} (prompt - 1)"
        )
    whole = message.target_prompt_logprobs is not None or message.prompt_alt_tokens_k > 0
    if whole and isinstance(rollout, ServedRollout) and rollout.vocabulary > MOST_LIKELY:
        raise BadRequest(
            "target_prompt_logprobs and prompt_alt_tokens_k need whole distributions, and the engine of this service "
            f"returns {MOST_LIKELY} tokens at each place"
        )
    if whole and len(prompt) * rollout.vocabulary > MOST_SCORES:
        raise BadRequest(
            f"target_prompt_logprobs and prompt_alt_tokens_k need the distribution at each of {len(prompt)} places "
            f"over {rollout.vocabulary} tokens; at most {MOST_SCORES:,} numbers are computed for one request"
        )


async def _sequence(
    rollout: Rollout, snapshot: str, prompt: tuple[int, ...], one: Completion, top_k: int
) -> SampledSequence:
    likely = None
    if top_k:
        scores = await rollout.score(snapshot, (*prompt, *one.token_ids), top_k)
        part = slice(len(prompt), None)
        ids, values = scores.top_ids[part].cpu().numpy(), scores.top_logprobs[part].float().cpu().numpy()
        likely = ids.astype(np.int32), values
    return SampledSequence(one.token_ids, one.logprobs, one.stop_reason is StopReason.STOP, likely)


def _targets(targets: TensorData, every: NDArray[np.float32]) -> NDArray[np.float32]:
    shape = targets.shape or []
    if targets.dtype != "int64" or len(shape) != 2 or shape[0] != len(every):
        raise BadRequest(f"target_prompt_logprobs should be int64 [{len(every)}, K], found {targets.dtype} {shape}")
    if not 0 < shape[1] <= MOST_LIKELY:
        raise BadRequest(
            f"target_prompt_logprobs asks for {shape[1]} tokens at each place: 1 to {MOST_LIKELY} are served"
        )
    wanted = np.full(shape, -1, np.int64)
    data = np.asarray(np.clip(targets.data, -2, every.shape[1]), np.int64)  # what is out of range stays so
    if targets.sparse_crow_indices is not None:
        rows, columns = (
            np.asarray(one, np.int64) for one in (targets.sparse_crow_indices, targets.sparse_col_indices or [])
        )
        filled(wanted, rows, columns, data, "target_prompt_logprobs")
    elif data.size == wanted.size:
        wanted = data.reshape(shape)
    else:
        raise BadRequest(f"target_prompt_logprobs has {data.size} numbers, and its shape {shape} has {wanted.size}")
    return looked_up(every, wanted, "target_prompt_logprobs")
