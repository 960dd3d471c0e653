"""Weights that a model keeps in float32 while it computes in a narrower dtype.

transformers computes these in float32 whatever the rest is in: parameters that the architecture names in
`_keep_in_fp32_modules_strict` (some routers), parameters that a class makes in float32 in a model of any dtype (decays
of a state), and buffers of the state dict (the bias that balances DeepSeek-V3's experts). `_keep_in_fp32_modules`,
without `strict`, concerns float16 only.

The trainer, the weight sync, the built-in rollout and exports all ask `wide_weights`, so they hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

WideFn = Callable[[str], bool]

# Model type -> ends of the names of parameters that its class makes in float32. No list of transformers has them; its
# loader keeps the dtype in which a parameter was made.
_MADE_IN_FLOAT32: Mapping[str, str] = {
    "hunyuan_v1_moe": ".mlp.gate.wg.weight",
    "olmo_hybrid": ".linear_attn.A_log",
    "zamba": ".mamba.A_log",
}


def wide_weights(model: nn.Module) -> WideFn:
    """Return whether the named weight of the state dict stays in float32. A LoRA adapter changes no answer."""
    lists = [getattr(module, "_keep_in_fp32_modules_strict", None) or () for module in model.modules()]
    patterns = {pattern for patterns in lists for pattern in patterns}
    kinds = {module.config.model_type for module in model.modules() if isinstance(module, PreTrainedModel)}
    made = tuple(end for kind, end in _MADE_IN_FLOAT32.items() if kind in kinds)
    buffers = {plain_name(name) for name, _ in state_buffers(model)}

    def wide(name: str) -> bool:
        plain = plain_name(name)
        return plain in buffers or plain.endswith(made) or any(pattern in plain for pattern in patterns)

    return wide


def plain_name(name: str) -> str:
    """The name of a weight in a model without adapters; PEFT may wrap a layer twice."""
    return name.replace(".base_layer", "")


def in_dtype(name: str, tensor: Tensor, dtype: torch.dtype, wide: WideFn) -> Tensor:
    """A weight as a model that computes in `dtype` holds it: the same tensor if it is held so already."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(dtype, torch.float32) if wide(name) else dtype)


def hold_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast every weight of a model, in place, to the dtype in which it is held while computing in `dtype`."""
    wide = wide_weights(model)
    for name, tensor in (*model.named_parameters(), *state_buffers(model)):
        tensor.data = in_dtype(name, tensor.data, dtype, wide)


def state_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of the state dict; those that a model computes for itself (rotary frequencies) are not in it."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, buffer
