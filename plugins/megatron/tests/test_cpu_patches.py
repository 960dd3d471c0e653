"""Patches on megatron-core: each is still needed, and torch itself stays as it is."""

import inspect

import pytest
import torch

pytest.importorskip("megatron.core")

from hone_megatron import cpu_patches

LITERALS = {  # patch -> module -> what megatron-core writes there; without it the patch can go
    "gradient_buffers": {"param_and_grad_buffer": "torch.cuda.current_device()"},
    "sequence_parallel_buffers": dict.fromkeys(
        ("layers", "mappings", "utils", "core_utils"), "torch.cuda.current_device()"
    ),
    "token_counts": {"schedules": 'device="cuda"'},
    "stage_messages": {"p2p_communication": "torch.cuda.synchronize()"},
    "routers": {"router": "torch.cuda.current_device()"},
    "expert_dispatch": {"token_dispatcher": "torch.cuda.Stream()"},
    "uneven_exchanges": {"mappings": "torch.distributed.all_gather(output_tensor_list, input_"},
    "random_states": {"random": "torch.cuda."},
}


def test_every_patch_is_still_needed():
    assert set(LITERALS) == {patch.__name__ for patch in cpu_patches.PATCHES}
    for patch, modules in LITERALS.items():
        for module, literal in modules.items():
            source = inspect.getsource(getattr(cpu_patches, module))
            assert literal in source, f"{module} no longer has {literal}: remove it from {patch}"


def test_patched_modules_make_cpu_tensors_and_torch_stays(monkeypatch):
    for patch in cpu_patches.PATCHES:
        for module in LITERALS[patch.__name__]:
            monkeypatch.setattr(getattr(cpu_patches, module), "torch", torch)
    cpu_patches.patch_for_cpu()
    theirs = cpu_patches.schedules.torch
    assert theirs.zeros([2], dtype=torch.int, device="cuda").device.type == "cpu"
    assert theirs.empty(2, device=theirs.cuda.current_device()).device.type == "cpu"
    assert theirs.nn is torch.nn
    assert cpu_patches.token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([2, 3]), as_numpy=True).tolist() == [2, 3]
    assert theirs is not torch
    assert "cuda" in vars(torch)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
