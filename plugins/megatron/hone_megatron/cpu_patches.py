"""Patches on megatron-core 0.16, which takes every device for CUDA. They are applied on a CPU only.

megatron-core writes `device="cuda"` and `torch.cuda.current_device()` as literals. Each patch replaces the name `torch`
in the modules that do so: factories give CPU tensors, and streams and synchronisation do nothing. torch itself stays as
it is for everybody else.
Upstream: https://github.com/NVIDIA/Megatron-LM/tree/core_v0.16.1/megatron/core
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import utils as core_utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import layers, mappings, random, utils
from megatron.core.transformer.moe import router, token_dispatcher
from torch import Tensor

FACTORIES = ("empty", "zeros", "ones", "tensor")


class _Stream:
    """A stream, and an event on it: on a CPU all work is done in order."""

    def wait_stream(self, _: _Stream) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _all_gather(parts: list[Tensor], own: Tensor, group: Any) -> None:
    """`dist.all_gather` of tensors with different lengths, which gloo does not have."""
    length, gathered = len(own), torch.cat(parts)
    sends = own.repeat(len(parts), *(1,) * (own.dim() - 1))
    dist.all_to_all_single(gathered, sends, [len(part) for part in parts], [length] * len(parts), group)
    for part, values in zip(parts, gathered.split([len(part) for part in parts]), strict=True):
        part.copy_(values)


def _reduce_scatter(own: Tensor, parts: list[Tensor], group: Any) -> None:
    """`dist.reduce_scatter` of tensors with different lengths, which gloo does not have."""
    length, received = len(own), own.repeat(len(parts), *(1,) * (own.dim() - 1))
    dist.all_to_all_single(received, torch.cat(parts), [length] * len(parts), [len(part) for part in parts], group)
    torch.sum(received.view(len(parts), *own.shape), 0, out=own)


class _CpuTorch(types.ModuleType):
    """torch without CUDA: tensors that are asked for on `cuda` are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))
        self.cuda = types.SimpleNamespace(
            current_device=lambda: torch.device("cpu"),
            Stream=_Stream,
            current_stream=_Stream,
            stream=lambda _: contextlib.nullcontext(),
            synchronize=lambda *_: None,
            is_available=torch.cuda.is_available,
        )
        self.distributed = _UnevenDistributed("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _UnevenDistributed(types.ModuleType):
    """torch.distributed, whose collectives over lists take tensors with different lengths on gloo too."""

    all_gather = staticmethod(_all_gather)
    reduce_scatter = staticmethod(_reduce_scatter)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = "cpu"
        return make(*arguments, **options)

    return made


def gradient_buffers() -> None:
    """Gradient and parameter buffers are made on `torch.cuda.current_device()`."""
    param_and_grad_buffer.torch = _CPU


def sequence_parallel_buffers() -> None:
    """Buffers of the all-gathers and reduce-scatters of sequence parallelism."""
    for module in (layers, mappings, utils, core_utils):
        module.torch = _CPU


def token_counts() -> None:
    """The schedules count tokens in a tensor on `cuda`."""
    schedules.torch = _CPU


def stage_messages() -> None:
    """Patch the messages of pipeline stages, which are received in CUDA memory and wait for `torch.cuda`."""
    p2p_communication.torch = _CPU


def routers() -> None:
    """A router moves its weight to `torch.cuda.current_device()`."""
    router.torch = _CPU


def expert_dispatch() -> None:
    """Tokens go to their experts on a side stream, and counts become host numbers only if they are CUDA tensors."""

    def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.torch = _CPU
    token_dispatcher.maybe_move_tensor_to_cpu = as_numbers


def uneven_exchanges() -> None:
    """Ranks that share experts exchange different numbers of tokens by all-gather and reduce-scatter, for NCCL."""
    mappings.torch = _CPU


def random_states() -> None:
    """Sequence parallelism runs layers under CUDA's random states, for dropout; models here have none."""

    class Tracker:
        def fork(self, *_: Any) -> contextlib.nullcontext[None]:
            return contextlib.nullcontext()

        def is_initialized(self) -> bool:
            return True

    random._CUDA_RNG_STATE_TRACKER = Tracker()
    random.initialize_rng_tracker = lambda *_, **__: None


_CPU = _CpuTorch()
PATCHES = (
    gradient_buffers,
    sequence_parallel_buffers,
    token_counts,
    stage_messages,
    routers,
    expert_dispatch,
    uneven_exchanges,
    random_states,
)


def patch_for_cpu() -> None:
    """Apply every patch; a second call changes nothing."""
    for patch in PATCHES:
        patch()
