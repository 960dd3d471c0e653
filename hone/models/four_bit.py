"""Linear layers with frozen weights in 4 bits (QLoRA, arXiv 2305.14314), with bitsandbytes.

    weight [out, in] --blocks of 64: absmax, 16 levels--> 4 bits each --absmax in 8 bits (double)--> 4.13 bits each
                                                             |
    forward, backward <--dequantised for each call-----------'

The formats and their kernels come from bitsandbytes (0.50); the layer is defined here. Its `Linear4bit` repacks the
weights at the first forward on a CPU with bfloat16 instructions and computes in bfloat16 from then on, so generation
and training would use different values. Its CPU kernel dequantises wrongly if the row length is not a multiple of a
block, so it gets the weight as one long row.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BitsAndBytesConfig, PreTrainedModel

from hone.models.errors import ModelError
from hone.models.settings import FourBitConfig
from hone.registry import unknown

KEY = "lora.quantise"
_BLOCK = 64  # weights that share one absmax
_PENDING = "quant_storage"  # attribute of bitsandbytes' parameters
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it warns about an unused kernel


class FourBitLinear(nn.Linear):
    """A frozen linear layer in 4 bits. Reading `weight` dequantises it each time.

    The state dict has the packed bits [out * in / 2, 1] as `weight`; see `plain_weights`.
    """

    packed: Tensor  # uint8, two weights each
    absmax: Tensor  # per block: float32, or uint8 (double quantisation)
    _layout: Any  # bitsandbytes' QuantState; its numbers are used, not its tensors
    _stored: torch.dtype  # dtype of the file and of the computation

    @classmethod
    def take_over(cls, layer: nn.Module, packed: Tensor, state: Any) -> None:
        """Turn a linear layer into a 4-bit one in place, so that references to it stay valid."""
        layer._parameters.pop("weight", None)
        layer.__dict__.pop("quant_state", None)
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer._stored = state.dtype
        tensors = {"packed": packed, "absmax": state.absmax}
        if state.nested:
            tensors |= {"offset": state.offset, "scales": state.state2.absmax, "code": state.state2.code}
        for name, tensor in tensors.items():
            layer.register_buffer(name, tensor.detach(), persistent=False)
        layer._layout = _numbers_of(state)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantised weight [out, in] in the dtype of its file; a new tensor."""
        tools = _bitsandbytes().functional
        layout, absmax = self._layout, self.absmax
        if layout["double"]:
            absmax = tools.dequantize_blockwise(
                absmax, absmax=self.scales, code=self.code, blocksize=layout["outer"], nested=False
            )
            absmax = absmax + self.offset
        narrow = self._stored if self._stored in (torch.bfloat16, torch.float16) else torch.float32
        state = tools.QuantState(
            absmax=absmax,
            shape=torch.Size((self.out_features * self.in_features,)),
            dtype=narrow,
            blocksize=layout["block"],
            quant_type=layout["kind"],
        )
        plain: Tensor = tools.dequantize_4bit(self.packed, state)
        return plain.view(self.out_features, self.in_features).to(self._stored)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias

    def bytes(self) -> int:
        """Bytes of the weight in memory."""
        return sum(one.numel() * one.element_size() for one in self._buffers.values() if one is not None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed


class _Product(torch.autograd.Function):
    """x @ weight.T that keeps only the 4 bits: the backward dequantises the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight, None


def plain_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Entries of the model's state dict, with 4-bit weights dequantised one at a time."""
    layers = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, FourBitLinear)}
    for name, tensor in weights:
        yield name, layers[name].weight if name in layers else tensor


# ------------------------------------------------------------------------------------------------------------ making


def reading_options(empty: Any, config: FourBitConfig, name: str) -> dict[str, Any]:
    """Options of `from_pretrained` that quantise each weight as soon as it is read; call `finish` afterwards.

    `empty` is the same model without weights; `name` is for errors. Quantisation runs on the CPU, so that every reader
    of the files gets the same bits. Raises ModelError without bitsandbytes, and for a model without such layers.
    """
    _bitsandbytes()
    chosen = {path for path, _ in chosen_layers(empty, config, name)}
    others = [path for path, one in empty.named_modules() if isinstance(one, nn.Linear) and path not in chosen]
    options = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.kind,
        bnb_4bit_use_double_quant=config.double,
        llm_int8_skip_modules=[f"{re.escape(path)}$" for path in others] or ["$^"],
    )
    return {"quantization_config": options, "device_map": {"": "cpu"}}


def finish(model: Any) -> None:
    """Replace the 4-bit layers of a model that was read with `reading_options` by `FourBitLinear`."""
    for layer in [one for one in model.modules() if isinstance(one, _bitsandbytes().nn.Linear4bit)]:
        FourBitLinear.take_over(layer, layer.weight.data, layer.weight.quant_state)
    model.hf_quantizer.remove_quantization_config(model)  # else transformers saves it in 4 bits and forbids to move it
    for name in ("is_loaded_in_4bit", "is_4bit_serializable"):
        model.__dict__.pop(name, None)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config.__dict__.pop("_is_quantized", None)


def quantise(model: Any, config: FourBitConfig, name: str) -> None:
    """Quantise a model that already has its weights."""
    tools = _bitsandbytes().functional
    for _, layer in chosen_layers(model, config, name):
        packed, state = tools.quantize_4bit(
            layer.weight.data, blocksize=_BLOCK, compress_statistics=config.double, quant_type=config.kind
        )
        FourBitLinear.take_over(layer, packed, state)


def chosen_layers(model: Any, config: FourBitConfig, name: str) -> list[tuple[str, nn.Linear]]:
    """Linear layers but the head and those in `config.skip`. Raises ModelError for a name that no layer has."""
    head = model.get_output_embeddings()
    linear = [(path, one) for path, one in model.named_modules() if type(one) is nn.Linear and one is not head]
    for skipped in config.skip:
        if not any(has(path, skipped) for path, _ in model.named_modules()):
            known = sorted({path.rpartition(".")[2] for path, _ in linear})
            raise ModelError(f"{KEY}.skip or modules_to_save: " + unknown(f"layer of {name}", skipped, known))
    chosen = [(path, one) for path, one in linear if not any(has(path, skipped) for skipped in config.skip)]
    if not chosen:
        raise ModelError(f"{KEY}: {name} has no linear layer (torch.nn.Linear) to quantise")
    return chosen


def has(path: str, name: str) -> bool:
    """Return whether the dotted `path` contains `name`, which may be several names joined by dots."""
    return f".{name}." in f".{path}."


def still_empty(model: nn.Module) -> set[nn.Parameter]:
    """Weights that will be quantised when they are read; `fully_shard` cannot shard them."""
    return {weight for weight in model.parameters() if hasattr(weight, _PENDING)}


@contextmanager
def seen_as_plain(model: nn.Module) -> Iterator[None]:
    """Make empty layers look plain to PEFT, which would copy values that are not there yet (for DoRA)."""
    layers = [one for one in model.modules() if hasattr(one._parameters.get("weight"), _PENDING)]
    before: list[tuple[type[nn.Module], Any]] = [(type(one), one._parameters["weight"]) for one in layers]
    for layer, (_, weight) in zip(layers, before, strict=True):
        layer.__class__ = nn.Linear
        layer._parameters["weight"] = nn.Parameter(torch.empty_like(weight.data), requires_grad=False)
    try:
        yield
    finally:
        for layer, (cls, weight) in zip(layers, before, strict=True):
            layer.__class__, layer._parameters["weight"] = cls, weight


def _numbers_of(state: Any) -> dict[str, Any]:
    outer = state.state2.blocksize if state.nested else 0
    return {"block": state.blocksize, "kind": state.quant_type, "double": bool(state.nested), "outer": outer}


def _bitsandbytes() -> Any:
    """Raises ModelError if it is not installed."""
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ModelError(f"{KEY} needs the package bitsandbytes: pip install 'bitsandbytes>=0.50'") from error
