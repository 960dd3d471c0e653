"""Scores what others sampled with a rollout engine: a teacher without a training engine.

Scorer         the built-in engine, in this process, at the run's temperature
ServedScorer   vLLM, SGLang, a plug-in's: servers that read the teacher's weights from its folder, at temperature 1
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import replace

import torch

from hone.config import ConfigError, count_as_read
from hone.models.loading import DTYPES, load_language_model
from hone.models.settings import ModelConfig
from hone.platforms.base import current_platform
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import ReplicaLost, Scored, ServerAdapter
from hone.rollout.builtin import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import Batch, ModelOutput
from hone.workers.handles import RunFn
from hone.workers.rollout import RolloutSpec, server_specs, start_all

TOP_K = "top_k:"  # a need that carries a number, as in `hone.engines.forward`


class Scorer:
    """A model in a rollout engine of this process: it holds no more than the weights that are computed with."""

    def __init__(self, model: ModelConfig, settings: BuiltinSettings, compute_dtype: str, temperature: float) -> None:
        weights = load_language_model(model).to(DTYPES[compute_dtype])  # type: ignore[arg-type]
        self._engine = BuiltinEngine(settings, weights, device=current_platform().device)
        self._temperature = temperature

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        """Log-probs of the tokens with a loss. Raises ValueError if more is needed of their distributions."""
        if needs:
            raise ValueError(
                f"the built-in rollout engine scores sampled tokens only, and {', '.join(sorted(needs))} is needed"
            )
        scores = torch.cat(self._engine.score(_sequences(batch), self._temperature)).to(batch.token_ids.device)
        return ModelOutput(logprobs=torch.where(batch.loss_mask, scores, 0))


class ServedScorer:
    """A model on servers, which share its sequences; one that dies is started again, `max_restarts` times in all."""

    def __init__(self, spec: RolloutSpec, run: RunFn) -> None:
        """Starts the servers.

        Raises ConfigError for an engine that scores nothing, and ServerFailed, with nothing left running, if one does
        not start.
        """
        settings = spec.settings
        adapter = ROLLOUT_ENGINES.get(settings.backend)
        if not hasattr(adapter, "score"):
            raise ConfigError(f"backend: {settings.backend} has no `score`: it cannot say how likely it finds tokens")
        count_as_read(settings.builtin)
        token = secrets.token_hex(32)
        self._replicas: list[ServerAdapter] = [adapter(replace(one, frozen=True)) for one in server_specs(spec, token)]
        self._run = run
        self._per_replica = settings.requests_per_replica
        self._restarts_left = settings.max_restarts
        self._numbers = itertools.count()
        self._starting: dict[str, asyncio.Future[None]] = {}
        try:
            run(start_all(self._replicas))
        except BaseException:
            self.close()
            raise

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        """Log-probs of the tokens with a loss, and for "top_k:K" the K most likely tokens at their places.

        Raises ReplicaLost if a server died more often than it is started again, TimeoutError if it does not answer.
        """
        top_k = max((int(need.removeprefix(TOP_K)) for need in needs if need.startswith(TOP_K)), default=0)
        if other := sorted(need for need in needs if not need.startswith(TOP_K)):
            raise ValueError(f"a rollout server scores tokens, and {', '.join(other)} is needed")
        scored: list[Scored] = self._run(self._score_all(_sequences(batch), top_k))
        device = batch.token_ids.device
        logprobs = torch.tensor([one for each in scored for one in each.logprobs], device=device)
        found = ModelOutput(logprobs=torch.where(batch.loss_mask, logprobs, 0))
        if not top_k:
            return found
        blank_ids, blank = (0,) * top_k, (0.0,) * top_k
        ids = [one or blank_ids for each in scored for one in each.top_ids]
        likely = [one or blank for each in scored for one in each.top_logprobs]
        extras = {"top_k_ids": torch.tensor(ids, device=device), "top_k_logprobs": torch.tensor(likely, device=device)}
        mask = batch.loss_mask[:, None]
        return replace(found, extras={name: torch.where(mask, one, 0) for name, one in extras.items()})

    async def _score_all(self, sequences: list[tuple[int, ...]], top_k: int) -> list[Scored]:
        places = [asyncio.Semaphore(self._per_replica) for _ in self._replicas]
        tasks = [
            asyncio.ensure_future(self._score(sequence, number % len(places), places, top_k))
            for number, sequence in enumerate(sequences)
        ]
        try:
            return await asyncio.gather(*tasks)  # each request has a deadline
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(
        self, sequence: tuple[int, ...], number: int, places: list[asyncio.Semaphore], top_k: int
    ) -> Scored:
        replica = self._replicas[number]
        async with places[number]:
            while True:
                try:
                    return await replica.score(f"score/{next(self._numbers)}", sequence, top_k)
                except ReplicaLost as error:
                    await self._started_again(replica, error)

    async def _started_again(self, replica: ServerAdapter, error: ReplicaLost) -> None:
        """Return when a lost server is back: of all requests that lost it, the first one starts it."""
        if replica.name not in self._starting:
            if not self._restarts_left:
                raise error
            self._restarts_left -= 1
            self._starting[replica.name] = asyncio.ensure_future(self._start_again(replica))
        await asyncio.shield(self._starting[replica.name])

    async def _start_again(self, replica: ServerAdapter) -> None:
        try:
            await replica.close()
            await replica.start()
        finally:
            del self._starting[replica.name]

    def close(self) -> None:
        """End the servers; again is fine."""
        self._run(_close_all(self._replicas))


async def _close_all(replicas: list[ServerAdapter]) -> None:
    await asyncio.gather(*(one.close() for one in replicas))


def _sequences(batch: Batch) -> list[tuple[int, ...]]:
    if batch.images is not None:
        raise ValueError("a teacher with served_by: rollout sees no images; set served_by: engine for this one")
    tokens, ends = batch.token_ids.tolist(), batch.cu_seqlens.tolist()
    return [tuple(tokens[start:end]) for start, end in itertools.pairwise(ends)]
