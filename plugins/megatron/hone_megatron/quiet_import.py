"""Imports Megatron-Core first, without its warnings about optional packages (Apex, Transformer Engine)."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model  # noqa: F401
