"""Check, before the first step, that models and rollout servers fit on the devices that they share.

    while the rollout generates    what the models keep there    + the servers' share                   <= the device
    while a model trains           that, and its gradients       + the servers' share, if none sleeps   <= the device

The optimizer's state does not exist before the first step, so without this check a run ends in the middle of it.
Activations are not counted: they depend on the micro-batches, and are freed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hone.config import ConfigError
from hone.workers.rollout_role import DeviceShare, RolloutHandle
from hone.workers.train import TrainHandle

GIB = 2**30


def require_room(actor: TrainHandle, models: Sequence[TrainHandle], rollout: RolloutHandle) -> None:
    """Raise ConfigError if servers, and trained models on the actor's devices, need more memory than a device has."""
    if rollout.share is None:
        return
    there = [model for model in models if model.devices is actor.devices]
    found = [{name: one.value for name, one in model.device_memory().items()} for model in there]
    kept = max(one["allocated"] for one in found) + sum(one["kept"] for one in found)  # the models share processes
    training = max(one["training"] for one in found)
    problem = why_no_room(min(one["total"] for one in found), kept, training, rollout.share, rollout.sleeps)
    if problem:
        raise ConfigError(problem)


def why_no_room(total: float, kept: float, training: float, share: DeviceShare, sleeps: bool) -> str:
    """Empty if there is room, else the arithmetic and what to set. Sizes are in bytes.

    `kept`: what the models keep on the device from the first step on; `training`: what they need besides to train.
    """
    servers = share.fraction * share.servers
    phases = (
        ("while the rollout generates", kept, servers),
        ("while a model trains", kept + training, 0.0 if sleeps else servers),
    )
    when, models, awake = max(phases, key=lambda phase: phase[1] + phase[2] * total)
    needed = models + awake * total
    if needed <= total:
        return ""
    parts = [f"{models / GIB:.1f} GiB for weights, optimizer state{'' if models == kept else ' and gradients'}"]
    parts += [f"{awake * total / GIB:.1f} GiB for rollout servers ({share.key}={share.fraction:g})"] if awake else []
    rest = math.floor(100 * (total - models) / total / share.servers) / 100
    remedies = [f"{share.key}={rest:g}"] if awake and rest > 0 else []
    remedies.append("actor.backend.offload=true" if models == kept else "actor.optimizer.name=AdamW8bit")
    return (
        f"{when}, a device that both use needs {needed / GIB:.1f} GiB and has {total / GIB:.1f}: "
        f"{' and '.join(parts)}, activations not counted; set {' or '.join(remedies)}, or use more devices"
    )


__all__ = ["require_room", "why_no_room"]
