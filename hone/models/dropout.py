"""Dropout in training: none, unless `model.use.dropout` says so.

Old and reference log-probs are computed without dropout. With it, the policy's log-probs differ from them before the
first step: importance ratios are not 1, and DPO's first loss is not log 2.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

Dropout = float | Literal["config"]

_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")  # routers multiply their input by it in training
_DRAWS = "router_jitter_noise"  # of PhiMoE's routers, which draw experts in training between nearly equal ones


def set_dropout(model: nn.Module, dropout: Dropout) -> None:
    """Use the rate `dropout` in every dropout of the model (attention, residuals, embeddings, activations).

    0 also turns off the random noise of routers, drawn experts (PhiMoE's routers choose as in evaluation) and the
    skipping of layers; "config" leaves all as the model has it.
    Call this before a LoRA adapter is attached: the adapter's own dropout is `lora.dropout`.
    """
    if dropout == "config":
        return
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = dropout
        if dropout == 0 and hasattr(module, _DRAWS):
            module.train = functools.partial(_stay_in_evaluation, module)  # type: ignore[method-assign]
            module.eval()
        for name, rate in list(vars(module).items()):
            if not isinstance(rate, float):
                continue
            if "dropout" in name or "pdrop" in name:
                setattr(module, name, dropout)
            elif dropout == 0 and (name in _NOISE or "layerdrop" in name or "drop_prob" in name):
                setattr(module, name, 0.0)


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for `Module.train`."""
    return nn.Module.train(module, False)


@contextmanager
def seeded(device: str, *numbers: int) -> Iterator[None]:
    """Random draws that depend on `numbers` (seed, step, micro-batch, data rank) and on nothing else.

    So ranks that share a micro-batch drop alike, and a resumed run goes on as if it had not stopped.
    """
    kind = torch.device(device).type
    own = [] if kind == "cpu" else [getattr(torch, kind).current_device()]
    with torch.random.fork_rng(own, **({"device_type": kind} if own else {})):  # the CPU's is always forked
        digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
        torch.manual_seed(int.from_bytes(digest, "big"))
        yield
