"""Weight decay by what a weight is."""

from __future__ import annotations

from torch import Tensor

_TIME_MIX = ("time_mix_key", "time_mix_value", "time_mix_receptance")  # shares of RWKV's tokens, one for each channel
_APART = ("A_log", "D", "sinks", *_TIME_MIX)  # weights whose size says something by itself


def is_decayed(name: str, weight: Tensor) -> bool:
    """Return whether weight decay applies to a weight: to matrices, not to biases, norms, scales and decay rates.

    The number of dimensions alone does not say it: the biases of all experts of a layer are one tensor of two
    dimensions, and so are norms with a scale for each head, DoRA's norms of experts, Mamba's `A_log` and Zamba's `D`.
    """
    *_, module, leaf = ("", *name.split("."))
    is_bias = leaf.endswith("bias") or module.endswith("bias")
    is_norm = "norm" in module.lower() or "lora_magnitude_vector" in name
    return weight.dim() >= 2 and not is_bias and not is_norm and leaf not in _APART
