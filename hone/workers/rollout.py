"""Starts the rollout that a run file names: an engine in this process, or servers behind a router.

    rollout.backend: builtin, process: inside  -> BuiltinEngine, weights copied (`LocalWay`); several behind a Router
                              process: separate -> Router -> RemoteBuiltin x replicas         `ChannelWay`: buckets over
    rollout.backend: vllm, sglang, a plug-in's  -> Router -> its adapter x replicas           `weights.transport`

This is the one place that knows the difference.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from hone.config import ConfigError, count_as_read
from hone.engines.settings import LoraConfig
from hone.models.loading import DTYPES, check_model_source, folder_of
from hone.models.routing import expert_count, mixture_layers
from hone.models.settings import ModelConfig
from hone.models.source import locate
from hone.models.vision import FAMILIES
from hone.platforms.base import current_platform
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.adapters import AdapterFiles, AdapterKind
from hone.rollout.base import RolloutEngine, ServerAdapter, ServerSpec
from hone.rollout.host import LocalHost
from hone.rollout.remote import RemoteBuiltin
from hone.rollout.router import Router
from hone.rollout.server import ServerFailed
from hone.rollout.settings import RolloutConfig
from hone.runtime.base import PhaseFn
from hone.runtime.settings import RuntimeConfig
from hone.weights.settings import WeightSyncConfig
from hone.workers.handles import ADAPTER, AdapterRule, RolloutHandle, RolloutParts, RunFn
from hone.workers.hosts import hosts_of, reaching
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
    lora: LoraConfig | None = None  # the adapter that the policy trains; None: it trains all weights
    adapters: Mapping[str, str] = field(
        default_factory=dict
    )  # served beside the policy: name -> folder in PEFT's format
    trained: bool = True  # whether the policy's weights change
    routed_experts: bool = False  # whether completions have to say which experts their tokens went to
    runtime: RuntimeConfig | None = None  # whose machines servers are placed on; None: they start on this one
    role: str = "rollout"  # by which a pool of the runtime names them


def start_rollout(spec: RolloutSpec, run: RunFn, phase: PhaseFn) -> RolloutHandle:
    """The rollout of a run, without weights: the first weight sync fills it. Close it to end its servers.

    Raises ModelError for a model that cannot be used, ConfigError for settings that do not fit each other, and
    ServerFailed, with nothing left running, if a server does not start.
    """
    check_model_source(spec.model)
    engine_class = ROLLOUT_ENGINES.get(spec.settings.backend)
    in_process = bool(getattr(engine_class, "in_process", False))
    routed = _routed_layers(spec, engine_class) if spec.routed_experts else ()
    rule = _adapter_rule(spec, engine_class)
    if spec.adapters and spec.trained and rule is None:
        raise ConfigError(
            f"adapters {', '.join(spec.adapters)} are made for weights that do not change: they are served beside a "
            "policy whose own LoRA adapter travels by itself (actor.lora, with sync: adapter), or one not trained"
        )
    if in_process and spec.settings.builtin.process == "inside":
        return RolloutHandle(_inside(spec, engine_class, rule), run, phase)
    if not in_process:
        count_as_read(spec.settings.builtin)
    return RolloutHandle(_servers(spec, RemoteBuiltin if in_process else engine_class, run, rule, routed), run, phase)


def _routed_layers(spec: RolloutSpec, engine_class: Any) -> tuple[int, ...]:
    """The mixture layers of the model. Raises ConfigError if the rollout cannot say where its tokens went in them."""
    key = "actor.moe.routing_replay: rollout, but"
    if not getattr(engine_class, "returns_routes", False):
        raise ConfigError(
            f"{key} rollout.backend={spec.settings.backend} does not return the experts of its tokens; set old_logprobs"
        )
    config = engine_config(spec.model, spec.compute_dtype)
    if not expert_count(config):
        raise ConfigError(f"{key} {spec.model.path} ({config.model_type}) has no experts; set none")
    layers = mixture_layers(config)
    if not layers:
        raise ConfigError(f"{key} no router of {spec.model.path} ({config.model_type}) can be found; set none")
    return layers


def _adapter_rule(spec: RolloutSpec, engine_class: Any) -> AdapterRule | None:
    """When the adapter travels by itself. Raises ConfigError if it should always, and the rollout cannot take it."""
    if spec.lora is None or spec.lora.sync == "merged":
        return None
    unfit = getattr(engine_class, "unfit_for_adapter", lambda kind: "it takes whole weights only")
    model = engine_config(spec.model, spec.compute_dtype).get_text_config().model_type
    reason = unfit(adapter_kind(spec.lora, model))
    if reason and spec.lora.sync == "adapter":
        raise ConfigError(
            f"actor.lora.sync: adapter, but rollout.backend={spec.settings.backend} cannot take this adapter by "
            f"itself: {reason}; set merged, or auto"
        )
    return None if reason else AdapterRule(unfit, required=spec.lora.sync == "adapter", model=model)


def adapter_kind(lora: LoraConfig, model: str) -> AdapterKind:
    """What can be known of the adapter before there is one, on a model of transformers' type `model`."""
    if lora.path is not None:
        return AdapterKind.of(AdapterFiles.at(lora.path).config, model)
    twice = lora.init in ("pissa", "olora")  # its beginning travels with it
    whole = bool(lora.modules_to_save)
    return AdapterKind(2 * lora.rank if twice else lora.rank, lora.dora, whole_modules=whole, model=model)


def adapter_files(folders: Mapping[str, str]) -> dict[str, AdapterFiles]:
    """The adapters in these folders, by name. Raises ConfigError for one that is none, or whose name is taken."""
    if ADAPTER in folders:
        raise ConfigError(f"an adapter beside the policy is named {ADAPTER!r}, which is the policy's own name")
    return {name: AdapterFiles.at(folder) for name, folder in folders.items()}


def _inside(spec: RolloutSpec, engine_class: Any, rule: AdapterRule | None) -> RolloutParts:
    settings = spec.settings
    config = engine_config(spec.model, spec.compute_dtype)
    device = current_platform().device
    named = {"adapters": files} if (files := adapter_files(spec.adapters)) else {}
    engines: list[RolloutEngine] = [
        engine_class(settings.builtin, config, spec.tokenizer, device, f"{settings.backend}-{number}", **named)
        for number in range(settings.replicas)
    ]
    engine = engines[0] if len(engines) == 1 else Router(engines, settings, spec.tokenizer)
    dtype = served_dtype(engines[0])
    way = LocalWay(engines, spec.weights)
    level = _sleep_level(settings, level_auto=1)
    return RolloutParts(engine, dtype, way, level, _probe(spec, dtype), rule)


def _servers(
    spec: RolloutSpec, adapter: Any, run: RunFn, rule: AdapterRule | None, routed: tuple[int, ...] = ()
) -> RolloutParts:
    kind = str(check_model_source(spec.model).get("model_type"))
    if kind in FAMILIES and not getattr(adapter, "takes_images", False):
        raise ConfigError(
            f"rollout.backend = {spec.settings.backend}: its servers are sent text only, and {kind} sees images; use "
            "backend vllm, or builtin with rollout.builtin.process: inside"
        )
    token = secrets.token_hex(32)
    lora = adapter_kind(spec.lora, rule.model) if spec.lora is not None and rule is not None else None
    specs = [replace(one, adapter=lora, routed_layers=routed) for one in server_specs(spec, token)]
    replicas: list[ServerAdapter] = [adapter(one) for one in specs]
    router = Router(replicas, spec.settings, spec.tokenizer)
    way = ChannelWay(router, reaching(spec.weights, [one.host for one in specs]), token)
    dtype = replicas[0].dtype
    level_auto = 2 if rule is None else 1  # a base that stays is not sent again
    level = _sleep_level(spec.settings, level_auto if any(one.host.is_shared for one in specs) else 0)
    parts = RolloutParts(router, dtype, way, level, _probe(spec, dtype), rule)
    try:
        run(start_all(replicas))
    except BaseException:
        run(router.close())
        run(way.close())
        raise
    return parts


def server_specs(spec: RolloutSpec, token: str) -> list[ServerSpec]:
    """What each server is constructed from; devices go round where there are fewer than servers need.

    A server that the runtime places elsewhere is given its devices there.
    """
    settings, model, platform = spec.settings, spec.model, current_platform()
    folder, tokenizer = folder_of(model, weights=False), ""
    if model.tokenizer:
        tokenizer = str(locate(model.tokenizer, "model.tokenizer", weights=False).folder)
    logs = spec.folder.absolute() / SERVERS
    logs.mkdir(parents=True, exist_ok=True)
    adapters = adapter_files(spec.adapters)
    found = []
    hosts = hosts_of(spec.role, settings.replicas, settings.tensor_parallel, spec.runtime, logs)
    for number, host in enumerate(hosts):
        devices: tuple[int, ...] = ()
        is_placed = not isinstance(host, LocalHost)
        if platform.device != "cpu" and not is_placed:
            first, count = number * settings.tensor_parallel, platform.device_count()
            devices = tuple(sorted({(first + rank) % count for rank in range(settings.tensor_parallel)}))
            if len(devices) < settings.tensor_parallel:
                raise ConfigError(
                    f"rollout.tensor_parallel = {settings.tensor_parallel} is more than the {count} devices there are"
                )
        found.append(
            ServerSpec(
                settings=settings,
                model=str(folder),
                dtype=spec.compute_dtype,
                number=number,
                logs=logs,
                token=token,
                tokenizer=tokenizer,
                trust_remote_code=model.trust_remote_code,
                adapters=adapters,
                devices=devices,
                environment={} if is_placed else platform.rollout_environment(devices),
                host=host,
            )
        )
    return found


async def start_all(replicas: Sequence[ServerAdapter]) -> None:
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


def _sleep_level(settings: RolloutConfig, level_auto: int) -> int:
    chosen = settings.sleep_while_training
    if chosen == "auto":
        return 0 if current_platform().device == "cpu" else level_auto
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
    folder = folder_of(model, weights=False)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    config.dtype = DTYPES[compute_dtype]
    config.eos_token_id = _end_ids(folder, config)
    return config


def _end_ids(folder: Path, config: Any) -> Any:
    """What ends a completion: the generation config's ids where the model has one (chat models list several there)."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # the model has no such file
        return config.get_text_config().eos_token_id
    return generation.eos_token_id if generation.eos_token_id is not None else config.get_text_config().eos_token_id


def served_dtype(engine: RolloutEngine) -> torch.dtype:
    """The floating-point dtype that the engine stores its weights in."""
    return next(dtype for dtype, _ in engine.expected_weights().values() if dtype.is_floating_point)


__all__ = ["RolloutSpec", "ServerFailed", "engine_config", "served_dtype", "server_specs", "start_rollout"]
