"""Quantised checkpoints: dequantise those that transformers can dequantise, and refuse the others.

config.json names the method. Dequantising does not undo the rounding: training starts from the dequantised values.
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
    """The quantisation method of the checkpoint with this config.json; empty if it is not quantised."""
    quantised = config.get("quantization_config") or {}
    if not quantised:
        return ""
    guessed = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & quantised.keys() else "unknown"
    return str(quantised.get("quant_method") or guessed)


def loading_options(config: Mapping[str, Any], source: str, sharded: bool) -> dict[str, Any]:
    """Extra options of `from_pretrained` that dequantise the weights. `source` is key and value, for errors.

    Raises ModelError for a checkpoint that cannot be dequantised, or not while it is read shard by shard.
    """
    method = method_of(config)
    if not method:
        return {}
    if method not in DEQUANTISED:
        raise ModelError(
            f"{source} is quantised ({method}), and such weights cannot be trained; use the checkpoint "
            f"that was quantised (hone dequantises only {' and '.join(DEQUANTISED)})"
        )
    if sharded:
        raise ModelError(
            f"{source} is quantised ({method}) and cannot be read shard by shard; a run dequantises its own "
            "model into the run folder first: use <run.dir>/model of such a run here"
        )
    return {"quantization_config": DEQUANTISED[method](dequantize=True)}


def refuse_leftovers(names: Iterable[str], source: str) -> None:
    """Raise ModelError if unused weights of the files belong to a quantisation that config.json does not name."""
    found = sorted(name for name in names if name.endswith(_LEFTOVERS))
    if found:
        raise ModelError(
            f"{source} has quantised weights ({found[0]}, {len(found)} in total), but config.json names no "
            "quantisation method; use the checkpoint that was quantised"
        )
