"""Another model that scores a batch: a teacher, a reference, a reward model. One role, `ScoringModel`, in three places.

engine    a training engine that only infers: `TrainHandle`, or for the reference of a LoRA policy `WithoutAdapter`
server    a rollout engine: `BuiltinScorer` in this process, at the run's temperature; `ServerScorer` on servers
          (vLLM, a plug-in's) that read the weights from the model's folder, at temperature 1
process   a process of its own with a training engine (`hone.trainers.reward_models.process`)
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import replace
from typing import Any, Protocol

import torch

from hone.config import ConfigError, count_as_read
from hone.models.loading import DTYPES, load_language_model
from hone.models.numerics.precision import hold_in
from hone.models.settings import ModelConfig
from hone.platforms.base import current_platform
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.router import Router
from hone.rollout.settings import BuiltinSettings
from hone.types import Batch, ModelOutput, Need, Scored, TopK
from hone.workers.rollout import RolloutSpec, server_specs, start_all
from hone.workers.rollout_role import RunFn
from hone.workers.train import TrainHandle


class ScoringModel(Protocol):
    """A model that says of the tokens of a batch how likely it finds them, or what they are worth."""

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        """`logprobs` [T] of the tokens with a loss, or `values` [T]; in `extras` the outputs in `needs`."""


class WithoutAdapter:
    """A LoRA policy before training: its frozen weights, so that no second model is loaded."""

    def __init__(self, policy: TrainHandle) -> None:
        self._policy = policy

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        return self._policy.infer_batch(batch, needs, adapter=False)


class BuiltinScorer:
    """A model in a rollout engine of this process: weights in the compute dtype, without optimizer."""

    def __init__(self, model: ModelConfig, settings: BuiltinSettings, compute_dtype: str, temperature: float) -> None:
        weights = load_language_model(model)
        hold_in(weights, DTYPES[compute_dtype])
        self._engine = BuiltinEngine(settings, weights, device=current_platform().device)
        self._temperature = temperature

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        """Return log-probs of the tokens with a loss. Raises ValueError for other `needs`."""
        if needs:
            raise ValueError(
                f"the built-in rollout engine scores sampled tokens only, and {', '.join(sorted(map(str, needs)))} is "
                "needed"
            )
        found = self._engine.score_all(_sequences(batch), self._temperature)
        scores = torch.cat([one.logprobs for one in found]).to(batch.token_ids.device)
        return ModelOutput(logprobs=torch.where(batch.loss_mask, scores, 0))


class ServerScorer:
    """A model on servers behind a router; servers that die are restarted."""

    def __init__(self, spec: RolloutSpec, run: RunFn) -> None:
        """Raises ConfigError for an engine that cannot score."""
        settings = spec.settings
        adapter = ROLLOUT_ENGINES.get(settings.backend)
        if not hasattr(adapter, "score"):
            raise ConfigError(f"backend: {settings.backend} has no `score`: it computes no log-probs of given tokens")
        count_as_read(settings.builtin)
        specs = [replace(one, frozen=True) for one in server_specs(spec, secrets.token_hex(32))]
        self._servers = [adapter(one) for one in specs]
        self._router = Router(self._servers, settings)
        self._router.restore_with(_reads_its_own_weights)
        self._run = run
        self._numbers = itertools.count()

    def start(self) -> None:
        """Start the servers. Raises ServerFailed, with nothing left running, if one does not start."""
        try:
            self._run(start_all(self._servers))
        except BaseException:
            self.close()
            raise

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        """Return log-probs of the tokens with a loss, and for `TopK` the most likely tokens at their places.

        Raises RuntimeError if no server is left, RequestLate if one does not answer within its deadline.
        """
        top_k = max((need.count for need in needs if isinstance(need, TopK)), default=0)
        if other := sorted(str(need) for need in needs if not isinstance(need, TopK)):
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
        try:
            async with asyncio.TaskGroup() as tasks:  # each request has a deadline
                calls = [self._router.score(f"score/{next(self._numbers)}", one, top_k) for one in sequences]
                scored = [tasks.create_task(call) for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in scored]

    def close(self) -> None:
        """End the servers. May be called again."""
        self._run(self._router.close())


async def _reads_its_own_weights(replica: Any) -> bool:
    """Restore nothing: a restarted server reads the weights from its model's folder."""
    return True


def _sequences(batch: Batch) -> list[tuple[int, ...]]:
    if batch.images is not None:
        raise ValueError("a teacher with served_by: rollout takes no images; set served_by: engine for this one")
    tokens, ends = batch.token_ids.tolist(), batch.cu_seqlens.tolist()
    return [tuple(tokens[start:end]) for start, end in itertools.pairwise(ends)]
