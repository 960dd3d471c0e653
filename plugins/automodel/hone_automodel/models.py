"""Automodel's own model classes, computed in plain PyTorch around hone's packed attention."""

from __future__ import annotations

from typing import Any

from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.qwen3 import model as qwen3
from transformers import PreTrainedModel

from hone.models.errors import ModelError

# With "sdpa", attention goes through transformers' interface, where hone registers its own.
OPERATORS = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "rope_fusion": False}


# Exports name the class as the architecture, by which vLLM and SGLang choose a model: these are transformers' names.


class Qwen3Model(qwen3.Qwen3Model):  # type: ignore[misc]
    """The body of Automodel's Qwen3."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, BackendConfig(**OPERATORS))


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):  # type: ignore[misc]  # the package has no types
    """Automodel's Qwen3."""

    tie_weights = PreTrainedModel.tie_weights  # Automodel's does not tell transformers' loader which weights are tied

    def __init__(self, config: Any) -> None:
        super().__init__(config, BackendConfig(**OPERATORS))
        self.model.__class__ = Qwen3Model  # is built from its config alone, too: hone checks a small one


def model_class(kind: str, is_value_model: bool, key: str) -> type[PreTrainedModel]:
    """Automodel's class for a model type; `key` is the setting that asks for it.

    Raises ModelError for a family that this engine takes from transformers only.
    """
    if kind != "qwen3":
        raise ModelError(f"{key} = automodel has qwen3 only, found model_type {kind!r}; set it to transformers")
    return Qwen3Model if is_value_model else Qwen3ForCausalLM
