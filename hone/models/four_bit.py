"""Linear layers whose frozen weights are held in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes.

    weight [out, in] --blocks of 64: absmax, 16 levels--> 4 bits each --absmax in 8 bits (double)--> 4.13 bits each
                                                             |
    forward, backward <--made plain for the moment-----------'

bitsandbytes (0.50) has the formats, and kernels that read and write them; the layer is this file's. `Linear4bit` there
packs the weights anew for CPUs with bfloat16 instructions as soon as it is only asked, and computes in bfloat16 from
then on: what a model says would not be what it is trained on. Its kernel for CPUs makes wrong weights of rows that are
no multiple of a block long, so it is shown one long row.
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
_PENDING = "quant_storage"  # an attribute of bitsandbytes' parameters
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # misses a kernel that is not used here


class FourBitLinear(nn.Linear):
    """A frozen linear layer in 4 bits; `weight` is what they stand for, made anew each time it is asked for.

    In the state dict, `weight` is the packed bits [out * in / 2, 1]: see `plain_weights`.
    """

    packed: Tensor  # uint8, two weights each
    absmax: Tensor  # of each block: float32, or (double) uint8
    _layout: Any  # bitsandbytes' QuantState, of which the numbers and not the tensors are used
    _stored: torch.dtype  # what the weight was read in, and is computed in

    @classmethod
    def take_over(cls, layer: nn.Module, packed: Tensor, state: Any) -> None:
        """Turn a linear layer into this one, in place, so that whatever holds it still does."""
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
        """[out, in], in the precision in which it was read; a new tensor."""
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
        """What the weight takes."""
        return sum(one.numel() * one.element_size() for one in self._buffers.values() if one is not None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed


class _Product(torch.autograd.Function):
    """x @ weight.T of which nothing is kept but the 4 bits: backward makes the weight plain once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight, None


def plain_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Entries of the model's state dict, those in 4 bits as what they stand for; one of them is plain at a time."""
    layers = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, FourBitLinear)}
    for name, tensor in weights:
        yield name, layers[name].weight if name in layers else tensor


# ------------------------------------------------------------------------------------------------------------ making


def reading_options(empty: Any, config: FourBitConfig, name: str) -> dict[str, Any]:
    """What `from_pretrained` is told to have each weight in 4 bits as soon as it is read; then call `finish`.

    `empty` is the same model without weights, `name` is for errors. On the CPU, so that whoever reads these files gets
    the same bits. Raises ModelError without bitsandbytes, and for a model that has no such layers.
    """
    _bitsandbytes()
    chosen = {path for path, _ in chosen_layers(empty, config, name)}
    others = [path for path, one in empty.named_modules() if isinstance(one, nn.Linear) and path not in chosen]
    options = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=config.kind,
        bnb_4bit_use_double_quant=config.double,
        llm_int8_skip_modules=[f"{re.escape(path)}$" for path in others] or ["$^"],
    )
    return {"quantization_config": options, "device_map": {"": "cpu"}}


def finish(model: Any) -> None:
    """Give a model that was read with `reading_options` the layers of this file."""
    for layer in [one for one in model.modules() if isinstance(one, _bitsandbytes().nn.Linear4bit)]:
        FourBitLinear.take_over(layer, layer.weight.data, layer.weight.quant_state)
    model.hf_quantizer.remove_quantization_config(model)  # it is not saved so, and moves as any model does
    for name in ("is_loaded_in_4bit", "is_4bit_serializable"):
        model.__dict__.pop(name, None)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config.__dict__.pop("_is_quantized", None)


def quantise(model: Any, config: FourBitConfig, name: str) -> None:
    """The same for a model that has its weights already."""
    tools = _bitsandbytes().functional
    for _, layer in chosen_layers(model, config, name):
        packed, state = tools.quantize_4bit(
            layer.weight.data, blocksize=_BLOCK, compress_statistics=config.double, quant_type=config.kind
        )
        FourBitLinear.take_over(layer, packed, state)


def chosen_layers(model: Any, config: FourBitConfig, name: str) -> list[tuple[str, nn.Linear]]:
    """Linear layers but the head and what `config.skip` names. Raises ModelError for a name that nothing has."""
    head = model.get_output_embeddings()
    linear = [(path, one) for path, one in model.named_modules() if type(one) is nn.Linear and one is not head]
    for skipped in config.skip:
        if not any(has(path, skipped) for path, _ in model.named_modules()):
            known = sorted({path.rpartition(".")[2] for path, _ in linear})
            raise ModelError(f"{KEY}.skip or modules_to_save: " + unknown(f"layer of {name}", skipped, known))
    chosen = [(path, one) for path, one in linear if not any(has(path, skipped) for skipped in config.skip)]
    if not chosen:
        raise ModelError(f"{KEY}: {name} has no linear layer (torch.nn.Linear) that could be held in 4 bits")
    return chosen


def has(path: str, name: str) -> bool:
    """Whether `name` is one of the names, or a run of names, that a path is made of."""
    return f".{name}." in f".{path}."


def still_empty(model: nn.Module) -> set[nn.Parameter]:
    """Weights that will be in 4 bits when they are read: nothing that `fully_shard` could cut."""
    return {weight for weight in model.parameters() if hasattr(weight, _PENDING)}


@contextmanager
def seen_as_plain(model: nn.Module) -> Iterator[None]:
    """While layers are empty, PEFT has to take them for plain ones: it would copy what has no values yet (for DoRA)."""
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
        raise ModelError(f"{KEY} needs the package bitsandbytes; it comes with hone-rl[qlora]") from error
