"""Scores of the base model, which a service samples from but does not train: asample with log-probs of the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from hone.types import Batch, ModelOutput
from hone_tinker.connection import Connection, ServiceFailed, field_of
from hone_tinker.messages import Answer, read_answer, sampling_request

T = TypeVar("T")


class BaseScorer:
    """Asks the sampler of one base model; the first call opens its session."""

    def __init__(self, service: Connection, base_model: str) -> None:
        self._service = service
        self._base_model = base_model
        self._session = ""
        self._asked = 0  # sampling requests

    def __call__(self, batch: Batch, top_k: int) -> ModelOutput:
        """Log-probs [T] of the tokens with a loss, and with `top_k` the likeliest tokens there, [T, K]; 0 elsewhere.

        Raises ServiceFailed.
        """
        bounds, mask = batch.cu_seqlens.tolist(), batch.loss_mask
        sequences = [batch.token_ids[a:b].tolist() for a, b in pairwise(bounds)]
        answers = self._service.wait(self._answers(sequences, top_k))
        logprobs = torch.where(mask, torch.cat([_scored(one.prompt_logprobs) for one in answers]).nan_to_num(0.0), 0)
        if not top_k:
            return ModelOutput(logprobs=logprobs)
        ids, values = (torch.cat(parts) for parts in zip(*(_scored(one.prompt_top) for one in answers), strict=True))
        likely = {"top_k_ids": ids.long(), "top_k_logprobs": values}
        return ModelOutput(logprobs=logprobs, extras={k: torch.where(mask[:, None], v, 0) for k, v in likely.items()})

    async def _answers(self, sequences: Sequence[list[int]], top_k: int) -> list[Answer]:
        if not self._session:
            await self._open()
        first, self._asked = self._asked, self._asked + len(sequences)
        bodies = [
            sampling_request(
                tokens,
                {"max_tokens": 1, "seed": 0, "temperature": 1.0},
                sampling_session_id=self._session,
                seq_id=first + number,
                prompt_logprobs=True,
                topk_prompt_logprobs=top_k,
            )
            for number, tokens in enumerate(sequences)
        ]
        self._service.usage.prefilled += sum(map(len, sequences))
        found = await asyncio.gather(*(self._service.result("asample", body) for body in bodies))
        return [read_answer(body) for body in found]

    async def _open(self) -> None:
        number = next(self._service.sampling_numbers)
        body = {"session_id": self._service.session_id, "sampling_session_seq_id": number}
        found = await self._service.post("create_sampling_session", {**body, "base_model": self._base_model})
        where = f"create_sampling_session at {self._service.url}"
        self._session = str(field_of(found, "sampling_session_id", where))


def _scored(found: T | None) -> T:
    """A part of an answer that was asked for."""
    if found is None:
        raise ServiceFailed("the service's sampler returned no log-probs of the prompt")
    return found
