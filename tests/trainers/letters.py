"""A model whose greedy answers are letters: large random weights, special tokens with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hone.config import build
from hone.models.settings import ModelConfig
from hone.trainers.run.run_model import local_model


def letter_model(folder: Path, shape: dict[str, Any], seed: int) -> Path:
    """Write the model into `folder`, which it returns; `shape` is `model.build`. Another seed has other answers."""
    local_model(build(ModelConfig, {"build": shape}, "test"), folder)
    file = folder / "model.safetensors"
    generator, weights = torch.Generator().manual_seed(seed), load_file(file)
    for key, weight in weights.items():
        weights[key] = torch.randn(weight.shape, generator=generator) if weight.ndim > 1 else weight
        if key.endswith("embed_tokens.weight"):
            letters = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list("abcd"))
            weights[key][[row for row in range(len(weight)) if row not in letters]] = 0.0
    save_file(weights, file, {"format": "pt"})
    return folder
