"""Start the rollout that a run file names: an engine in this process, or servers behind a router.

    backend builtin, process inside      BuiltinEngine here; several behind a Router     InProcess copies weights
            builtin, process separate    Router -> BuiltinServer x replicas              ToServers sends them by
            vllm, or a plug-in's         Router -> its adapter x replicas                `weights.transport`

Only this file knows the difference.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, GenerationConfig

from hone.config import ConfigError, count_as_read
from hone.engines.settings import LoraConfig
from hone.models.loading import DTYPES, check_model_source, folder_of
from hone.models.rotary import changing_rope
from hone.models.routing import expert_count, mixture_layers
from hone.models.settings import ModelConfig
from hone.models.source import locate
from hone.models.vision.model import FAMILIES
from hone.platforms.base import current_platform
from hone.processes.child import ServerFailed
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.adapters import AdapterFiles, AdapterKind
from hone.rollout.base import RolloutEngine, ServerAdapter, ServerSpec
from hone.rollout.lending import LentServer
from hone.rollout.router import Router
from hone.rollout.servers.attached import shared_token
from hone.rollout.servers.builtin import BuiltinServer
from hone.rollout.servers.host import Host, LocalHost
from hone.rollout.servers.shape import ServerRanks, shape_of
from hone.rollout.settings import RolloutConfig
from hone.runtime.base import PhaseFn
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.weights.settings import WeightSyncConfig
from hone.workers.control import CONTROL
from hone.workers.hosts.attaching import attached, serve_at
from hone.workers.hosts.placing import hosts_of, reaching
from hone.workers.hosts.spanning import SpanningHost
from hone.workers.publishing.concurrent import Concurrent
from hone.workers.publishing.probe import QUANTISED, Probe
from hone.workers.publishing.publication import ToServers
from hone.workers.publishing.sending import WeightSender
from hone.workers.rollout_role import (
    ADAPTER,
    AdapterRule,
    Background,
    DeviceShare,
    InProcess,
    Loop,
    RolloutHandle,
    RolloutParts,
)

NewWeights = Literal["finish", "recompute", "keep_cache"]
"""What new weights do to answers that are being written. `finish`: a replica lets its answers end before it takes them;
`recompute`: answers go on under them, with their KV computed again; `keep_cache`: with the old KV."""

SERVERS = "servers"  # folder of the servers' logs in a run folder
TRAINERS = (0,)  # the device of a trainer that is one process
CONTEXT_OPTIONS = ("max_model_len", "context_length")  # engines' options for the longest sequence


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Description of a rollout that can be started."""

    settings: RolloutConfig
    weights: WeightSyncConfig
    model: ModelConfig
    compute_dtype: str  # the trainer's; engines with dtype `auto` use it too
    tokenizer: Any
    folder: Path  # run folder; servers log into `<folder>/servers/`
    lora: LoraConfig | None = None  # the adapter that the policy trains; None: it trains all weights
    adapters: Mapping[str, str] = field(
        default_factory=dict
    )  # extra adapters to serve: name -> folder in PEFT's format
    trained: bool = True  # whether the policy's weights change
    routed_experts: bool = False  # whether completions contain routed experts
    runtime: RuntimeConfig | None = None  # its machines run the servers; None: this machine does
    role: str = "rollout"  # name in the runtime's pools
    new_weights: NewWeights | None = None  # what they do to answers being written; None: no answers are then
    lends: bool = False  # whether one server more runs on the trainer's device, while the trainer waits


def start_rollout(spec: RolloutSpec, loop: Loop, phase: PhaseFn) -> RolloutHandle:
    """Start a rollout, without weights: the first weight sync fills it. Close it to end its servers.

    Raises as `prepare_rollout`, and ServerFailed, with nothing left running, if a server does not start.
    """
    rollout = prepare_rollout(spec, loop, phase)
    rollout.start()
    return rollout


def prepare_rollout(spec: RolloutSpec, loop: Loop, phase: PhaseFn) -> RolloutHandle:
    """Construct a rollout, whose `start` starts its servers.

    Raises ModelError for a model that cannot be used, and ConfigError for settings that do not fit each other.
    """
    check_model_source(spec.model)
    engine_class = ROLLOUT_ENGINES.get(spec.settings.backend)
    in_process = bool(getattr(engine_class, "in_process", False))
    routed = _routed_layers(spec, engine_class) if spec.routed_experts else ()
    rule = _adapter_rule(spec, engine_class)
    if spec.adapters and spec.trained and rule is None:
        raise ConfigError(
            f"adapters {', '.join(spec.adapters)} need base weights that do not change, but this run sends all weights "
            "after each step; train a LoRA adapter and send it separately (actor.lora.sync=adapter)"
        )
    backend, inside = spec.settings.backend, spec.settings.builtin.process == "inside"
    if not inside:
        _require_server(engine_class, backend)
    if in_process and inside:
        if spec.new_weights is not None:
            _check_concurrent(spec, engine_class)
        return RolloutHandle(_inside(spec, engine_class, rule), loop, phase)
    if not in_process:
        count_as_read(spec.settings.builtin)
    parts = _servers(spec, BuiltinServer if in_process else engine_class, rule, routed)
    return RolloutHandle(parts, loop, phase)


async def serve_rollout(spec: RolloutSpec, address: str, ready: Callable[[str], None]) -> None:
    """Start one server of a rollout for runs that attach to it at HOST:PORT; see `attaching.serve_at`."""
    check_model_source(spec.model)
    engine_class = ROLLOUT_ENGINES.get(spec.settings.backend)
    _require_server(engine_class, spec.settings.backend)
    if bool(getattr(engine_class, "in_process", False)):
        engine_class = BuiltinServer
    routed = _routed_layers(spec, engine_class) if spec.routed_experts else ()
    rule = _adapter_rule(spec, engine_class)
    alone = replace(spec, settings=spec.settings.model_copy(update={"replicas": 1, "addresses": ()}))
    (one,) = _specs(alone, shared_token(os.environ), rule, routed)
    await serve_at(engine_class(one), one, address, spec.tokenizer, ready)


def _check_concurrent(spec: RolloutSpec, engine_class: Any) -> None:
    """Raise ConfigError unless an engine of this process can answer while the policy is trained, as it is set."""
    backend = spec.settings.backend
    if not getattr(engine_class, "answers_while_training", False):
        separate = not getattr(engine_class, "only_inside", False)
        instead = "rollout.builtin.process=separate" if separate else "asynchrony.staleness=0"
        raise ConfigError(
            f"asynchrony.staleness is above 0, but rollout.backend={backend} runs inside the trainer, which cannot "
            f"generate and train at the same time; set {instead}"
        )
    refused = {
        "asynchrony.new_weights=finish": spec.new_weights != "finish",
        "asynchrony.lend_trainer=false": spec.lends,
        "rollout.replicas=1": spec.settings.replicas > 1,
        "weights.verify=digest": spec.weights.verify == "probe",  # a probe discards the counts of open draws
    }
    for instead, is_so in refused.items():
        if is_so:
            raise ConfigError(
                f"asynchrony.staleness is above 0, and rollout.backend={backend} answers each request from one version "
                f"of the weights, which the service holds; set {instead}"
            )


def _require_server(engine_class: Any, backend: str) -> None:
    """Raise ConfigError for an engine that has no server."""
    if getattr(engine_class, "only_inside", False):
        raise ConfigError(f"rollout.backend={backend} runs inside the trainer only; set rollout.builtin.process=inside")


def _specs(spec: RolloutSpec, token: str, rule: AdapterRule | None, routed: tuple[int, ...]) -> list[ServerSpec]:
    lora = adapter_kind(spec.lora, rule.model) if spec.lora is not None and rule is not None else None
    return [replace(one, adapter=lora, routed_layers=routed) for one in server_specs(spec, token)]


def is_batch_invariant(backend: str) -> bool:
    """Return whether the tokens of a request do not depend on the requests that the engine computes with it."""
    return bool(getattr(ROLLOUT_ENGINES.get(backend), "batch_invariant", False))


def server_shape(settings: RolloutConfig) -> ServerRanks:
    """Return the ranks of one server with these settings. Raises ConfigError for sizes that are none."""
    return shape_of(settings)


def _routed_layers(spec: RolloutSpec, engine_class: Any) -> tuple[int, ...]:
    """Return the model's mixture layers. Raises ConfigError if the rollout cannot return routed experts."""
    key = "actor.moe.routing_replay: rollout, but"
    if not getattr(engine_class, "returns_experts", False):
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
    """Decide when the adapter is sent separately. Raises ConfigError if it always must be but cannot."""
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
    """Describe the adapter before it exists, for a model of transformers' type `model`."""
    if lora.path is not None:
        return AdapterKind.of(AdapterFiles.at(lora.path).config, model)
    twice = lora.init in ("pissa", "olora")  # its initial value is sent with it
    whole = bool(lora.modules_to_save)
    return AdapterKind(2 * lora.rank if twice else lora.rank, lora.dora, whole_modules=whole, model=model)


def adapter_files(folders: Mapping[str, str]) -> dict[str, AdapterFiles]:
    """Read the adapters in these folders, by name. Raises ConfigError for a folder without one, or a used name."""
    if ADAPTER in folders:
        raise ConfigError(f"an adapter is named {ADAPTER!r}, which is the name of the policy's own; rename it")
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
    router = None if len(engines) == 1 else Router(engines, settings, spec.tokenizer)
    dtype = served_dtype(engines[0])
    return RolloutParts(
        engine=engines[0] if router is None else router,
        dtype=dtype,
        in_files=False,
        publication=(InProcess if spec.new_weights is None else Concurrent)(engines, spec.weights),
        replicas=lambda: engines,
        sleep_level=_sleep_level(settings, level_auto=1) if spec.new_weights is None else 0,
        probe=_probe(spec, dtype),
        adapter=rule,
        end=None if router is None else router.close,
    )


def _servers(
    spec: RolloutSpec, server_class: Any, rule: AdapterRule | None, routed: tuple[int, ...] = ()
) -> RolloutParts:
    kind = str(check_model_source(spec.model).get("model_type"))
    if kind in FAMILIES and not getattr(server_class, "takes_images", False):
        raise ConfigError(
            f"rollout.backend = {spec.settings.backend}: its servers are sent text only, and {kind} sees images; use "
            "backend vllm, or builtin with rollout.builtin.process: inside"
        )
    if spec.new_weights == "keep_cache" and not getattr(server_class, "keeps_cache", False):
        raise ConfigError(
            f"asynchrony.new_weights: keep_cache, but rollout.backend={spec.settings.backend} does not keep prefix "
            "caches of two weight versions apart, so new prompts would use old KV; set recompute, or finish"
        )
    token = shared_token(os.environ) if spec.settings.addresses else secrets.token_hex(32)
    specs = _specs(spec, token, rule, routed)
    if spec.settings.addresses:
        specs = attached(specs, spec.tokenizer)
    replicas: list[ServerAdapter] = [server_class(one) for one in specs]
    router = Router(replicas, spec.settings, spec.tokenizer)
    sender = WeightSender(router, reaching(spec.weights, [one.host for one in specs]), token)
    dtype = replicas[0].dtype
    level_auto = 2 if rule is None else 1  # level 1 keeps the base, which is not sent again
    takes_turns = spec.new_weights is None and any(one.host.is_shared for one in specs)
    level = _sleep_level(spec.settings, level_auto if takes_turns else 0)

    numbers = itertools.count(spec.settings.replicas)

    def another(**changed: Any) -> ServerAdapter:
        if spec.settings.addresses:
            raise ConfigError("this run uses the servers at rollout.addresses, and starts none; no other can join")
        if any(one.host.machine for one in specs):
            raise ConfigError("servers join on the machine of the trainer only, and this run has them on others")
        number = next(numbers)
        more = replace(spec, settings=spec.settings.model_copy(update={"replicas": number + 1}))
        one = replace(_specs(more, token, rule, routed)[number], **changed)
        made: ServerAdapter = server_class(one)
        return made

    background = None
    if spec.new_weights is not None:
        lent = None
        if spec.lends:
            devices = () if current_platform().device == "cpu" else TRAINERS
            lent = _lent(spec, router, another(devices=devices, environment=_environment(devices)))
        background = Background(router, spec.weights.timeout_s, another, spec.folder / CONTROL, lent)
    in_files = bool(getattr(server_class, "loads_files", False))

    async def start() -> None:
        await start_all(replicas)
        if background is not None and background.lent is not None:
            await background.lent.start()

    parts = RolloutParts(
        engine=router,
        dtype=dtype,
        in_files=in_files,
        publication=ToServers(router, sender, copies=background is not None),
        replicas=lambda: router.serving,
        sleep_level=level,
        probe=_probe(spec, dtype),
        adapter=rule,
        background=background,
        lost=router.replica_failed,
        start=start,
        end=router.close,
        share=device_share(specs, replicas[0], _trainers_here(spec)),
    )
    if spec.new_weights is not None:
        _check_asynchronous(parts)
    return parts


def device_share(specs: Sequence[ServerSpec], replica: ServerAdapter, trainers: int = 1) -> DeviceShare | None:
    """Return the memory that servers take of a device of the trainer; one of them is `replica`.

    The trainer has the first devices of this machine, `trainers` of them.
    """
    found: tuple[str, float] | None = getattr(replica, "memory_fraction", None)
    shared = [one for one in specs if one.host.is_shared]
    if found is None or not shared or current_platform().device == "cpu":
        return None
    on_device = Counter(index for one in shared for index in one.devices)
    on_trainers = [on_device[index] for index in range(trainers)] if on_device else [1]
    if not any(on_trainers):  # servers have the other devices
        return None
    key, fraction = found
    return DeviceShare(fraction, max(on_trainers), f"rollout.engine.{key}")


def _trainers_here(spec: RolloutSpec) -> int:
    """Return the number of this machine's devices that the trainer computes on, as far as its runtime says."""
    backend = None if spec.runtime is None else spec.runtime.backend
    if isinstance(backend, RaySettings):
        return backend.most_here("actor")
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's


def _lent(spec: RolloutSpec, router: Router, server: ServerAdapter) -> LentServer:
    """The server on the trainer's device. Raises ConfigError if this device cannot take turns."""
    platform, backend = current_platform(), spec.settings.backend
    if refused := platform.why_no_sleep(backend):
        raise ConfigError(f"asynchrony.lend_trainer: {refused}; set asynchrony.lend_trainer=false")
    is_kept = platform.device == "cpu" or bool(spec.adapters) or spec.lora is not None
    return LentServer(router, server, 1 if is_kept else 2, spec.weights.timeout_s)


def _check_asynchronous(parts: RolloutParts) -> None:
    """Raise ConfigError for settings that need a trainer that waits while weights are sent."""
    if parts.sleep_level:
        raise ConfigError(
            "asynchrony.staleness is above 0, but the rollout sleeps while the policy is trained; set "
            "rollout.sleep_while_training=none"
        )
    if parts.probe is not None:
        raise ConfigError(
            "asynchrony.staleness is above 0, but weights.verify=probe compares with the trainer's model, which has "
            "changed by then; set weights.verify=digest"
        )


def server_specs(spec: RolloutSpec, token: str) -> list[ServerSpec]:
    """Build the spec of each server; if there are too few devices, servers share them.

    A server that the runtime places on another machine gets its devices there.
    """
    model, platform = spec.model, current_platform()
    settings = with_context(spec.settings, engine_config(model, spec.compute_dtype))
    folder, tokenizer = folder_of(model, weights=False), ""
    if model.tokenizer:
        tokenizer = str(locate(model.tokenizer, "model.tokenizer", weights=False).folder)
    logs = spec.folder.absolute() / SERVERS
    logs.mkdir(parents=True, exist_ok=True)
    adapters = adapter_files(spec.adapters)
    found = []
    runtime = None if settings.addresses else spec.runtime  # which has no place for servers that it does not start
    shape = shape_of(settings)
    hosts = hosts_of(spec.role, settings.replicas, shape.ranks, runtime, logs)
    _check_spread(settings, spec.lora, hosts)
    trainers = _trainers_here(spec)
    for number, host in enumerate(hosts):
        devices: tuple[int, ...] = ()
        is_placed = not isinstance(host, LocalHost)
        if platform.device != "cpu" and not is_placed:
            first, count, taken = number * shape.ranks, platform.device_count(), 0
            if spec.new_weights is not None and trainers < count > shape.ranks:
                taken = min(trainers, count - shape.ranks)  # the trainer's, which computes while the servers do
            devices = tuple(sorted({taken + (first + rank) % (count - taken) for rank in range(shape.ranks)}))
            if len(devices) < shape.ranks:
                raise ConfigError(f"{shape} is more than the {count} devices there are")
        found.append(
            ServerSpec(
                settings=settings,
                model=str(folder),
                context=model.used.context,
                dtype=spec.compute_dtype,
                number=number,
                logs=logs,
                token=token,
                tokenizer=tokenizer,
                trust_remote_code=model.trust_remote_code,
                keep_cache=spec.new_weights == "keep_cache",
                adapters=adapters,
                devices=devices,
                nodes=_machines(spec.runtime),
                environment={} if is_placed else _environment(devices),
                host=host,
            )
        )
    return found


def _check_spread(settings: RolloutConfig, lora: LoraConfig | None, hosts: Sequence[Host]) -> None:
    """Raise ConfigError if servers are to use several machines, and cannot."""
    if not any(isinstance(one, SpanningHost) for one in hosts):
        return
    refused = getattr(ROLLOUT_ENGINES.get(settings.backend), "why_one_machine", None)
    reason = f"a server of {settings.backend} uses one machine" if refused is None else refused(settings)
    if reason:
        raise ConfigError(
            f"rollout.backend = {settings.backend}: {shape_of(settings)} is more than the devices of one machine, and "
            f"{reason}; lower it, or give the machines more devices"
        )
    if lora is not None and lora.sync != "merged":
        raise ConfigError(
            f"actor.lora.sync = {lora.sync}: hone sends an adapter by itself to servers on one machine only, and "
            f"{shape_of(settings)} is more than the devices of one; set actor.lora.sync=merged"
        )


def _environment(devices: tuple[int, ...]) -> dict[str, str]:
    return current_platform().rollout_environment(devices)


def _machines(runtime: RuntimeConfig | None) -> int:
    """Return the number of machines that may run servers: the most of the run's and of any pool's."""
    backend = None if runtime is None else runtime.backend
    if not isinstance(backend, RaySettings):
        return 1
    return max([backend.nodes, *(pool.nodes for pool in backend.pools.values())])


def with_context(settings: RolloutConfig, config: Any) -> RolloutConfig:
    """Return the settings, with the option for the longest sequence where it selects the rotary frequencies.

    Raises ConfigError for a server that would use other frequencies than the trainer with `model.use.context`.
    """
    changing, option = changing_rope(config), getattr(ROLLOUT_ENGINES.get(settings.backend), "rope_option", None)
    if changing is None or option is None:
        return settings
    rope, plain_length = changing
    if not option or rope == "dynamic":
        raise ConfigError(
            f"rollout.backend: {settings.backend} lays out rotary positions of the type {rope} otherwise than the "
            "trainer, which keeps one set of frequencies for the run; use rollout.backend: builtin"
            f"{', or vllm' * (rope != 'dynamic')}"
        )
    longest = config.run_context or plain_length
    given = settings.engine.get(option, longest)
    if (given > plain_length) != (longest > plain_length):
        raise ConfigError(
            f"rollout.engine.{option}={given} and model.use.context={longest} lie on two sides of "
            f"original_max_position_embeddings={plain_length}, so {settings.backend} and the trainer would choose "
            f"different rotary frequencies; set model.use.context={given}"
        )
    return settings.model_copy(update={"engine": {**settings.engine, option: given}})


async def start_all(replicas: Sequence[ServerAdapter]) -> None:
    """Start all servers at once; after the first failure, end the others."""
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
    platform = current_platform()
    refused = platform.why_no_sleep(settings.backend)
    if chosen == "auto":
        return 0 if platform.device == "cpu" or refused else level_auto
    if refused and chosen != "none":
        raise ConfigError(
            f"rollout.sleep_while_training={chosen}: {refused}; set it to none, and give the servers their own devices"
        )
    return {"none": 0, "level_1": 1, "level_2": 2}[chosen]


def _probe(spec: RolloutSpec, dtype: torch.dtype) -> Probe | None:
    if spec.weights.verify != "probe":
        return None
    settings, model = spec.settings, engine_config(spec.model, spec.compute_dtype).get_text_config()
    longest = [getattr(model, "max_position_embeddings", None), settings.builtin.max_sequence_tokens]
    longest += [settings.builtin.kv_cache_tokens, *(settings.engine.get(name) for name in CONTEXT_OPTIONS)]
    context = min(limit for limit in longest if isinstance(limit, int) and limit > 0)
    dtypes = [dtype, DTYPES[spec.compute_dtype], *([QUANTISED] if settings.engine.get("quantization") else [])]
    temperature = settings.sampling.temperature or 1.0
    return Probe(model.vocab_size, temperature, dtypes, context, mixture=expert_count(model) > 0)


def engine_config(model: ModelConfig, compute_dtype: str) -> Any:
    """Return the model's transformers config with the compute dtype and the end-of-sequence ids."""
    folder = folder_of(model, weights=False)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    config.dtype = DTYPES[compute_dtype]
    config.run_context = model.used.context
    config.eos_token_id = _end_ids(folder, config)
    return config


def _end_ids(folder: Path, config: Any) -> Any:
    """Return the end-of-sequence ids of the generation config, if the model has one (chat models list several)."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # no generation config
        return config.get_text_config().eos_token_id
    return generation.eos_token_id if generation.eos_token_id is not None else config.get_text_config().eos_token_id


def served_dtype(engine: RolloutEngine) -> torch.dtype:
    """Return the floating-point dtype of the engine's weights."""
    dtypes = [dtype for dtype, _ in engine.expected_weights().values() if dtype.is_floating_point]
    return min(dtypes, key=lambda dtype: dtype.itemsize)  # some weights of a mixture stay in float32


__all__ = [
    "RolloutSpec",
    "ServerFailed",
    "engine_config",
    "is_batch_invariant",
    "prepare_rollout",
    "serve_rollout",
    "served_dtype",
    "server_shape",
    "server_specs",
    "start_rollout",
]
