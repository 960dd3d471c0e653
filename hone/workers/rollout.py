"""Starts the rollout engine that a run file names, in this process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from hone.config import count_as_read
from hone.models.loading import DTYPES, check_model_source
from hone.models.settings import ModelConfig
from hone.platforms.base import current_platform
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import RolloutEngine
from hone.rollout.settings import RolloutConfig


def start_rollout(settings: RolloutConfig, model: ModelConfig, compute_dtype: str, tokenizer: Any) -> RolloutEngine:
    """An engine of the model's architecture without weights: the first weight sync fills it.

    `compute_dtype` is the trainer's: an engine whose own dtype is `auto` generates in it, so that both sides compute
    alike. Raises ModelError for a model that cannot be used.
    """
    check_model_source(model)
    if settings.backend != "builtin":
        count_as_read(settings.builtin)
    config = AutoConfig.from_pretrained(
        model.path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
    )
    config.dtype = DTYPES[compute_dtype]
    config.eos_token_id = _end_ids(model, config)
    engine: RolloutEngine = ROLLOUT_ENGINES.get(settings.backend)(
        settings.builtin, config, tokenizer, current_platform().device
    )
    return engine


def _end_ids(model: ModelConfig, config: Any) -> Any:
    """What ends a completion: the generation config's ids where the model has one (chat models list several there)."""
    try:
        generation = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    except OSError:  # the model has no such file
        return config.eos_token_id
    return generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id


def served_dtype(engine: RolloutEngine) -> torch.dtype:
    """The floating-point dtype that the engine stores its weights in."""
    return next(dtype for dtype, _ in engine.expected_weights().values() if dtype.is_floating_point)
