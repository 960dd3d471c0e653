"""Quantised checkpoints: those that transformers can turn back into plain weights are, the others are refused.

A checkpoint says in its config.json how it is quantised. What was rounded stays rounded: training goes on from the
values that the quantised weights stand for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from hone.models.errors import ModelError

DEQUANTISED = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
"""How gpt-oss and DeepSeek-V3 are published; transformers dequantises them on any device."""


_LEFTOVERS = ("_scale_inv", ".weight_scale", "_scales", "_blocks", ".qweight", ".qzeros", ".weight_packed", ".absmax")


def method_of(config: Mapping[str, Any]) -> str:
    """How the checkpoint with this config.json is quantised; empty if it is not."""
    quantised = config.get("quantization_config") or {}
    if not quantised:
        return ""
    guessed = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & quantised.keys() else "unknown"
    return str(quantised.get("quant_method") or guessed)


def loading_options(config: Mapping[str, Any], path: str, sharded: bool) -> dict[str, Any]:
    """What `from_pretrained` is told beside the usual, so that plain weights come out.

    Raises ModelError for a checkpoint whose weights cannot be had back, or not shard by shard.
    """
    method = method_of(config)
    if not method:
        return {}
    if method not in DEQUANTISED:
        raise ModelError(
            f"model.path {path!r} is quantised ({method}), and such weights cannot be trained; name the checkpoint "
            f"that it was made from (of quantised ones, {' and '.join(DEQUANTISED)} are dequantised)"
        )
    if sharded:
        raise ModelError(
            f"model.path {path!r} is quantised ({method}) and cannot be read shard by shard; a run's own model is "
            "dequantised into the run folder first: start there, or name its <run.dir>/model here"
        )
    return {"quantization_config": DEQUANTISED[method](dequantize=True)}


def refuse_leftovers(names: Iterable[str], path: str) -> None:
    """Raise ModelError if weights that nothing took in are parts of quantised ones: the others are then not plain."""
    found = sorted(name for name in names if name.endswith(_LEFTOVERS))
    if found:
        raise ModelError(
            f"model.path {path!r} has parts of quantised weights ({found[0]}, {len(found)} in all), and its "
            "config.json does not say how they are quantised"
        )
