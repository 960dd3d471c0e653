"""Scores what others sampled with the built-in rollout engine: a teacher without a training engine."""

from __future__ import annotations

import itertools

import torch

from hone.models.loading import DTYPES, load_language_model
from hone.models.settings import ModelConfig
from hone.platforms.base import current_platform
from hone.rollout.builtin import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import Batch, ModelOutput


class Scorer:
    """A model in a rollout engine of this process: it holds no more than the weights that are computed with."""

    def __init__(self, model: ModelConfig, settings: BuiltinSettings, compute_dtype: str, temperature: float) -> None:
        weights = load_language_model(model).to(DTYPES[compute_dtype])  # type: ignore[arg-type]
        self._engine = BuiltinEngine(settings, weights, device=current_platform().device)
        self._temperature = temperature

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        """Log-probs of the tokens with a loss. Raises ValueError if more is needed of their distributions."""
        if needs:
            raise ValueError(f"a rollout engine scores sampled tokens only, and {', '.join(sorted(needs))} is needed")
        tokens, ends = batch.token_ids.tolist(), batch.cu_seqlens.tolist()
        sequences = [tuple(tokens[start:end]) for start, end in itertools.pairwise(ends)]
        scores = torch.cat(self._engine.score(sequences, self._temperature)).to(batch.token_ids.device)
        return ModelOutput(logprobs=torch.where(batch.loss_mask, scores, 0))
