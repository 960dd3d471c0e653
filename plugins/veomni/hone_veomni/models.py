"""VeOmni's model classes, and the operators that they call."""

from __future__ import annotations

import contextlib
import io
import sys

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from veomni.models.loader import MODELING_REGISTRY
from veomni.ops.dispatch import OpSlot
from veomni.ops.kernels.moe import apply_veomni_fused_moe_patch

from hone.models.errors import ModelError
from hone_veomni.settings import OperatorsConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types that the contract tests train; VeOmni has more."""

EXPERTS, EAGER = "moe_experts", "eager"


def model_class(kind: str, part: str, name: str) -> type[PreTrainedModel]:
    """VeOmni's class for a model type. `part` is "ForCausalLM" or "Model" (the body); `name` is for errors.

    Raises ModelError for a family that this engine does not train.
    """
    if kind not in FAMILIES:
        raise ModelError(
            f"backend veomni does not train {name}, whose model_type is {kind!r}: it trains {', '.join(FAMILIES)}; use "
            "backend fsdp2"
        )
    with contextlib.redirect_stdout(io.StringIO()):  # at import, transformers prints what VeOmni does not document
        found: type[PreTrainedModel] = MODELING_REGISTRY[kind](part)
    stored = get_checkpoint_conversion_mapping(kind)
    if stored is not None:  # names of experts in files, which transformers converts for registered classes only
        register_checkpoint_conversion_mapping(kind, stored, overwrite=True)
    return found


def choose_operators(cls: type[PreTrainedModel], operators: OperatorsConfig) -> None:
    """Give the operators of a class their implementations. VeOmni keeps them per family, for the whole process.

    Raises ValueError for an implementation that does not run here, and if another engine of this process has chosen
    another one.
    """
    for slot in vars(sys.modules[cls.__module__]).values():
        if not isinstance(slot, OpSlot):
            continue
        key = "moe" if slot.op_name == EXPERTS else slot.op_name
        wanted = getattr(operators, key, EAGER)  # hone calls none of the others: its own head computes the loss
        named = f"{operators.key_of(key)} = {wanted}"
        if slot.is_bound and slot._impl_name != wanted.removeprefix("fused_"):
            raise ValueError(f"{named}, but another model of this process has {slot._impl_name}; choose one for both")
        try:
            slot.bind(wanted.removeprefix("fused_"))
        except (RuntimeError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"{named} does not run here: {error}; leave it at eager") from error
        if slot.op_name == EXPERTS and wanted != EAGER:
            apply_veomni_fused_moe_patch(fused_moe_kernel=wanted.removeprefix("fused_"))
