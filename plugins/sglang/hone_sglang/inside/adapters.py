"""Load LoRA adapters in SGLang's schedulers, converted to a form that SGLang computes correctly.

    POST /update_weights_from_ipc, payload Adapter --> take ---- loaded already ---------> put, in the old one's place
                                                        `------- new: kept until the next line
    POST /load_lora_adapter {name, folder}         --> load ---- brought by a sync, or read from PEFT's files --> put
    put    (PEFT's tensors, config) --read_adapter, fused--> SGLang's LoRAAdapter --> its memory pool, at once

SGLang 0.5.23 always scales by alpha / r (no rsLoRA, no patterns), expects q, k and v of a layer together and all
matrices of one rank, and silently drops tensors that match no layer, or ends the scheduler at the first batch
(https://github.com/sgl-project/sglang/tree/main/python/sglang/srt/lora). So hone multiplies the scale into B, pads
ranks with zeros, adds zero matrices for missing partners, and refuses tensors that match no weight before anything
changes. A failure on one rank fails on all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import get_normalized_target_modules
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from hone.rollout.adapters import BROUGHT, PREFIX, AdapterFiles, Delta, read_adapter
from hone.workers.inside.receiving import checkpoint_shapes, listing, one_line
from hone_sglang.cpu_patches import Unpinned

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that SGLang computes as one
GATHERED = 2**16  # most bytes of one rank's message
_brought: dict[str, tuple[dict[str, Tensor], Mapping[str, Any]]] = {}  # by name, until SGLang loads them


def take(manager: LoRAManager | None, name: str, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Replace the adapter of this name; a new one waits until SGLang loads it.

    Raises ValueError, with nothing changed, for an adapter that SGLang would compute wrongly or has no room for.
    """
    if manager is None:
        raise ValueError("SGLang was started without room for an adapter")
    for ref in manager.lora_refs.values():
        if ref.lora_name == name:
            put(manager, ref, tensors, config)
            return
    in_sglangs_form(manager, tensors, config)
    _brought[name] = tensors, config


def load(manager: LoRAManager, ref: LoRARef) -> Any:
    """Replace `LoRAManager._load_lora_adapter`: afterwards all ranks hold the adapter, or none does.

    Never raises, because an exception would end the scheduler.
    """
    own = {}
    try:
        if ref.lora_path == BROUGHT:
            tensors, config = _brought.pop(ref.lora_name)
        else:
            files = AdapterFiles.at(ref.lora_path)
            tensors, config = files.tensors(), files.config
        put(manager, ref, tensors, config)
    except Exception as error:  # noqa: BLE001  reported to the trainer
        own = {"error": one_line(error)}
    errors = errors_of(gather(own))
    if errors:
        drop(manager, ref.lora_id)
    return manager.create_lora_update_result(success=not errors, error_message=errors)


def put(manager: LoRAManager, ref: LoRARef, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Register and load an adapter; running requests that name it use it from their next token on."""
    plain, settings = in_sglangs_form(manager, tensors, config)
    made = LoRAConfig.from_dict(settings, base_vocab_size=manager.base_hf_config.vocab_size)
    forget_slots(manager, {ref.lora_id})
    manager.configs[ref.lora_id] = made
    manager.load_lora_weights_from_tensors(ref, plain)
    manager.lora_refs[ref.lora_id] = ref
    manager.fetch_new_loras({ref.lora_id})


def drop(manager: LoRAManager, adapter: str) -> None:
    """Remove an adapter completely."""
    forget_slots(manager, {adapter})
    for kept in (manager.configs, manager.loras, manager.lora_refs):
        kept.pop(adapter, None)


def loaded(manager: LoRAManager | None) -> list[str]:
    """Return the names of the loaded adapters."""
    return [] if manager is None else sorted(ref.lora_name for ref in manager.lora_refs.values())


def forget_slots(manager: LoRAManager | None, adapters: set[str | None] | None = None) -> None:
    """Make SGLang reload adapters before the next batch (None: all, and the base's empty adapter)."""
    if manager is None:
        return
    held = manager.memory_pool.uid_to_buffer_id
    slots = {manager.memory_pool.remove_lora(uid) for uid in list(held) if adapters is None or uid in adapters}
    if slots:
        manager._notify_lora_slots_updated(slots)


def in_sglangs_form(
    manager: LoRAManager, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert an adapter to an equal one with scale 1, one rank and whole groups of fused layers."""
    shapes = checkpoint_shapes(manager.base_hf_config)
    deltas, whole = read_adapter(tensors, config, shapes)
    if config.get("use_dora") or whole:
        raise ValueError("SGLang takes plain LoRA alone: no DoRA, no modules that are trained whole")
    adapted = {weight.removesuffix(".weight") for weight in deltas}
    if without := sorted(layer for layer in adapted if not _has_room(manager, layer)):
        raise ValueError(
            f"SGLang was started without room for an adapter on {listing(without)}: rollout.engine.lora_target_modules "
            "says on what there is some"
        )
    rank = max(delta.parts["a"].shape[0] for delta in deltas.values())
    if rank > manager.max_lora_rank:
        raise ValueError(f"the adapter has rank {rank}, rollout.engine.max_lora_rank is {manager.max_lora_rank}")
    found: dict[str, Tensor] = {}
    every = sorted(_with_partners(adapted))
    if alone := [layer for layer in every if f"{layer}.weight" not in shapes]:
        raise ValueError(f"SGLang wants an adapter on {listing(alone)} too, which the model does not have")
    for layer in every:
        weight = f"{layer}.weight"
        b, a = _matrices(deltas[weight], rank) if weight in deltas else _nothing(shapes[weight], rank)
        found[f"{PREFIX}{layer}.lora_A.weight"], found[f"{PREFIX}{layer}.lora_B.weight"] = a, b
    modules = sorted({layer.rpartition(".")[2] for layer in every})
    return found, {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}


def _has_room(manager: LoRAManager, layer: str) -> bool:
    """Return whether SGLang accepts adapters for the layer, or for the fused layer that contains it."""
    block, _, last = layer.rpartition(".")
    (fused,) = get_normalized_target_modules([last])
    return any(f"{block}.{fused}" in modules for modules in manager.lora_modules)


def _with_partners(adapted: set[str]) -> set[str]:
    """Return these layers and the ones that SGLang fuses with them."""
    found = set(adapted)
    for layer in adapted:
        block, _, last = layer.rpartition(".")
        found |= {f"{block}.{one}" for group in FUSED if last in group for one in group}
    return found


def _matrices(delta: Delta, rank: int) -> tuple[Tensor, Tensor]:
    """Return B [out, rank] times its scale, in float32, and A [rank, in]; both padded with zeros."""
    a, b = delta.parts["a"], delta.parts["b"].float() * delta.scaling
    more = rank - a.shape[0]
    return torch.nn.functional.pad(b, (0, more)), torch.nn.functional.pad(a, (0, 0, 0, more))


def _nothing(shape: Any, rank: int) -> tuple[Tensor, Tensor]:
    rows, columns = shape
    return torch.zeros(rows, rank), torch.zeros(rank, columns)


# ------------------------------------------------------------------------------------------- what all ranks say


def gather(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange messages between ranks, in their order; as bytes, through the process group of SGLang's schedulers."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return [dict(said)]
    text = json.dumps(said).encode()
    if len(text) > GATHERED:  # every rank must take part in the exchange
        text = json.dumps({"error": f"it has {len(text)} bytes to say, which is too much"}).encode()
    own = torch.zeros(GATHERED, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = [torch.zeros_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(every, own, group=group.cpu_group)
    return [json.loads(bytes(one.tolist()).rstrip(b"\0")) for one in every]


def errors_of(said: list[dict[str, Any]]) -> str:
    """Join the errors of all ranks; empty if there are none."""
    return "; ".join(f"worker {rank}: {one['error']}" for rank, one in enumerate(said) if "error" in one)


LoRAManager._load_lora_adapter = load
if not torch.accelerator.is_available():
    layers.torch = torch_backend.torch = Unpinned()
    Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
