"""Starts the rollout that a run file names: an engine in this process, or servers behind a router.

    rollout.backend: builtin, process: inside  -> BuiltinEngine, weights copied (`LocalWay`); several behind a Router
                              process: separate -> Router -> RemoteBuiltin x replicas         `ChannelWay`: buckets over
    rollout.backend: vllm, sglang, a plug-in's  -> Router -> its adapter x replicas           `weights.transport`

This is the one place that knows the difference.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from hone.config import ConfigError, count_as_read
from hone.models.loading import DTYPES, check_model_source
from hone.models.settings import ModelConfig
from hone.platforms.base import current_platform
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.base import RolloutEngine, ServerAdapter, ServerSpec
from hone.rollout.remote import RemoteBuiltin
from hone.rollout.router import Router
from hone.rollout.server import ServerFailed
from hone.rollout.settings import RolloutConfig
from hone.runtime.base import PhaseFn
from hone.weights.settings import WeightSyncConfig
from hone.workers.handles import RolloutHandle, RolloutParts, RunFn
from hone.workers.probe import Probe
from hone.workers.weight_ways import ChannelWay, LocalWay

SERVERS = "servers"  # folder of the servers' logs in a run folder
CONTEXT_OPTIONS = ("max_model_len", "context_length")  # how engines call the longest sequence


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a rollout is started from."""

    settings: RolloutConfig
    weights: WeightSyncConfig
    model: ModelConfig
    compute_dtype: str  # the trainer's: an engine whose own dtype is `auto` generates in it, so both compute alike
    tokenizer: Any
    folder: Path  # of the run; servers log into `<folder>/servers/`


def start_rollout(spec: RolloutSpec, run: RunFn, phase: PhaseFn) -> RolloutHandle:
    """The rollout of a run, without weights: the first weight sync fills it. Close it to end its servers.

    Raises ModelError for a model that cannot be used, ConfigError for settings that do not fit each other, and
    ServerFailed, with nothing left running, if a server does not start.
    """
    check_model_source(spec.model)
    engine_class = ROLLOUT_ENGINES.get(spec.settings.backend)
    in_process = bool(getattr(engine_class, "in_process", False))
    if in_process and spec.settings.builtin.process == "inside":
        return RolloutHandle(_inside(spec, engine_class), run, phase)
    if not in_process:
        count_as_read(spec.settings.builtin)
    return RolloutHandle(_servers(spec, RemoteBuiltin if in_process else engine_class, run), run, phase)


def _inside(spec: RolloutSpec, engine_class: Any) -> RolloutParts:
    settings = spec.settings
    config = engine_config(spec.model, spec.compute_dtype)
    device = current_platform().device
    engines: list[RolloutEngine] = [
        engine_class(settings.builtin, config, spec.tokenizer, device, f"{settings.backend}-{number}")
        for number in range(settings.replicas)
    ]
    engine = engines[0] if len(engines) == 1 else Router(engines, settings, spec.tokenizer)
    dtype = served_dtype(engines[0])
    way = LocalWay(engines, spec.weights)
    return RolloutParts(engine, dtype, way, _sleep_level(settings, servers=False), _probe(spec, dtype))


def _servers(spec: RolloutSpec, adapter: Any, run: RunFn) -> RolloutParts:
    token = secrets.token_hex(32)
    replicas: list[ServerAdapter] = [adapter(one) for one in server_specs(spec, token)]
    router = Router(replicas, spec.settings, spec.tokenizer)
    way = ChannelWay(router, spec.weights, token)
    dtype = replicas[0].dtype
    parts = RolloutParts(router, dtype, way, _sleep_level(spec.settings, servers=True), _probe(spec, dtype))
    try:
        run(_start_all(replicas))
    except BaseException:
        run(router.close())
        run(way.close())
        raise
    return parts


def server_specs(spec: RolloutSpec, token: str) -> list[ServerSpec]:
    """What each server is constructed from; devices go round where there are fewer than servers need."""
    settings, model, platform = spec.settings, spec.model, current_platform()
    logs = spec.folder.absolute() / SERVERS
    logs.mkdir(parents=True, exist_ok=True)
    found = []
    for number in range(settings.replicas):
        devices: tuple[int, ...] = ()
        if platform.device != "cpu":
            first, count = number * settings.tensor_parallel, platform.device_count()
            devices = tuple(sorted({(first + rank) % count for rank in range(settings.tensor_parallel)}))
            if len(devices) < settings.tensor_parallel:
                raise ConfigError(
                    f"rollout.tensor_parallel = {settings.tensor_parallel} is more than the {count} devices there are"
                )
        found.append(
            ServerSpec(
                settings=settings,
                model=str(model.path),
                dtype=spec.compute_dtype,
                number=number,
                logs=logs,
                token=token,
                tokenizer=model.tokenizer or "",
                revision=model.revision or "",
                trust_remote_code=model.trust_remote_code,
                devices=devices,
                environment=platform.rollout_environment(devices),
            )
        )
    return found


async def _start_all(replicas: Sequence[ServerAdapter]) -> None:
    """Start all at the same time; the first failure ends the others."""
    tasks = [asyncio.ensure_future(replica.start()) for replica in replicas]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)  # each start has a deadline
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sleep_level(settings: RolloutConfig, servers: bool) -> int:
    chosen = settings.sleep_while_training
    if chosen == "auto":
        chosen = "none" if current_platform().device == "cpu" else "level_2" if servers else "level_1"
    return {"none": 0, "level_1": 1, "level_2": 2}[chosen]


def _probe(spec: RolloutSpec, dtype: torch.dtype) -> Probe | None:
    if spec.weights.verify != "probe":
        return None
    settings, model = spec.settings, engine_config(spec.model, spec.compute_dtype).get_text_config()
    longest = [getattr(model, "max_position_embeddings", None), settings.builtin.max_sequence_tokens]
    longest += [settings.builtin.kv_cache_tokens, *(settings.engine.get(name) for name in CONTEXT_OPTIONS)]
    context = min(limit for limit in longest if isinstance(limit, int) and limit > 0)
    return Probe(model.vocab_size, settings.sampling.temperature or 1.0, [dtype, DTYPES[spec.compute_dtype]], context)


def engine_config(model: ModelConfig, compute_dtype: str) -> Any:
    """The model's transformers config, with the dtype to compute in and the ids that end a completion."""
    config = AutoConfig.from_pretrained(
        model.path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
    )
    config.dtype = DTYPES[compute_dtype]
    config.eos_token_id = _end_ids(model, config)
    return config


def _end_ids(model: ModelConfig, config: Any) -> Any:
    """What ends a completion: the generation config's ids where the model has one (chat models list several there)."""
    try:
        generation = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    except OSError:  # the model has no such file
        return config.eos_token_id
    return generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id


def served_dtype(engine: RolloutEngine) -> torch.dtype:
    """The floating-point dtype that the engine stores its weights in."""
    return next(dtype for dtype, _ in engine.expected_weights().values() if dtype.is_floating_point)


__all__ = ["RolloutSpec", "ServerFailed", "engine_config", "served_dtype", "server_specs", "start_rollout"]
