"""The models of a run: one process set up for them, each placed on the run's devices."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import torch

from hone import machine
from hone.config import ConfigError
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import compute_dtype, current_platform, use_deterministic_kernels
from hone.platforms.host_memory import keep_freed
from hone.runtime import RUNTIMES, ranks
from hone.runtime.settings import RuntimeConfig
from hone.trainers.run.recorder import Recorder
from hone.workers.train import TrainHandle, TrainSpec, TrainWorker

LOG = logging.getLogger("hone.trainers")
LOST_BELOW = 1e-4  # a bfloat16 weight of 0.02 changes by steps of 1.2e-4
POLICY = "actor"  # the role that is trained on what it samples


def prepare_process(runtime: RuntimeConfig) -> None:
    """Set this process's threads, determinism and memory, and join the other ranks if torchrun started several.

    Raises ConfigError if torchrun started ranks of another runtime than `local`.
    """
    if ranks.ranks() > 1 and runtime.backend.name != "local":
        raise ConfigError(
            f"runtime.backend: {runtime.backend.name} takes no ranks from torchrun, and this is one of "
            f"{ranks.ranks()} that it started; start it without torchrun, or set runtime.backend=local"
        )
    ranks.join(runtime.collective_timeout_s)
    keep_freed()
    torch.set_num_threads(runtime.threads or _asked_threads() or max(1, machine.cores() // ranks.local_ranks()))
    if runtime.deterministic:
        use_deterministic_kernels()


def _asked_threads() -> int:
    """The threads that the environment asks for, which torch would have used; 0: none are asked for."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and ranks.ranks() == 1 else 0  # torchrun sets 1 for everybody


def require_same_vocabulary(key: str, model: ModelConfig, tokenizer: Any) -> None:
    """Raise ConfigError if a model's token ids mean something else than the policy's."""
    theirs, ours = load_tokenizer(model).get_vocab(), tokenizer.get_vocab()
    unlike = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    if unlike:
        token = unlike[0]
        raise ConfigError(
            f"{key}: its tokens are not the policy's: {len(unlike)} differ, the first is {token!r}, number "
            f"{theirs.get(token, 'none')} there and {ours.get(token, 'none')} here"
        )


def place_role(role: str, spec: TrainSpec, runtime: RuntimeConfig, recorder: Recorder) -> TrainHandle:
    """Place one model on the devices of the run. Raises ConfigError if its settings clash."""
    if spec.replays_routes and role != POLICY:
        raise ConfigError(
            f"{role}: moe.routing_replay = {spec.engine.routing_replay} is for the policy of a reinforcement-learning "
            "run (actor.moe): nothing else is trained on tokens that it sampled; remove the key"
        )
    dtype = compute_dtype(spec.engine.compute_dtype, current_platform())
    spec = replace(spec, driver_dtype=dtype)
    try:
        group = RUNTIMES.get(runtime.backend.name).place(role, TrainWorker, spec, runtime, recorder.phase)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    handle = TrainHandle(group, recorder.record, spec.replays_routes)
    handle.initialize()
    return handle


def lost_updates(model: ModelConfig, engine: EngineConfig) -> str | None:
    """A warning, if the dtype of a trained model's weights is too coarse for its learning rate."""
    if model.dtype != "bfloat16" or engine.optimizer.lr >= LOST_BELOW:
        return None
    dtype, lr = model.key_of("dtype"), engine.optimizer.key_of("lr")
    return (
        f"warning: {dtype}=bfloat16 stores 8 significant bits of each weight, so most updates of {lr}="
        f"{engine.optimizer.lr:g} are too small to change it and are lost; set {dtype}=float32 (compute_dtype may stay "
        f"bfloat16), or {lr}={LOST_BELOW:g} or more"
    )


def is_its_own_reference(policy: EngineConfig) -> bool:
    """Return whether a policy without adapter is the policy before training: not if it continues an adapter."""
    return policy.lora is not None and policy.lora.path is None


def frozen_engine(engine: EngineConfig, keep_adapter: bool = False) -> EngineConfig:
    """Engine settings of a model that is never trained: without an adapter, unless the policy starts with one.

    Another model than the policy's is not the one that a service holds, so an engine of hone's own computes it.
    """
    if keep_adapter:
        return engine
    backend = engine.backend
    if not backend.computes_here:
        backend = EngineConfig().backend
        LOG.warning("%s has the policy's base only: %s computes another model here", engine.backend.name, backend.name)
    return engine.model_copy(update={"lora": None, "backend": backend})
