"""Models and servers on a device of a run, from its settings: `hone.planner.memory.Setup`, and the passes of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hone.config import ConfigError
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import ModelConfig
from hone.planner.anatomy import Anatomy
from hone.planner.devices import Machine
from hone.planner.memory import BFLOAT16, FLOAT32, MOMENTS, Role, Serving, Setup
from hone.planner.roofline import Pass
from hone.platforms.base import AUTO, compute_dtype, current_platform
from hone.platforms.layout import Layout
from hone.runtime.settings import RaySettings
from hone.trainers.forecast.sizes import POLICY, Lengths, Sizes
from hone.trainers.policy.annotators import declared_stages
from hone.trainers.policy.checks import algorithm_of, distillation_of
from hone.trainers.policy.generation import has_servers
from hone.trainers.policy.settings import PolicyRunConfig, is_asynchronous
from hone.trainers.run.roles import is_its_own_reference

WIDTHS = {"bfloat16": BFLOAT16, "float16": 2, "float32": FLOAT32, "float64": 8}
STATES = {"SGD": 0.0, "Adafactor": 0.05} | dict.fromkeys(
    ("ASGD", "Adagrad", "RMSprop", "Lion", "Muon"), 1.0
)  # a weight

EIGHT_BIT = {"Adam8bit": 2.0, "AdamW8bit": 2.0, "Lion8bit": 1.0, "AdEMAMix8bit": 3.0}  # codes per weight
CODE = (1 + 4 / 256) / FLOAT32  # of a weight of float32: a code, and its share of a block's scale
SHARES = ("gpu_memory_utilization", "mem_fraction_static")  # options of servers for their share of a device
SHARE = 0.5  # that hone gives them
ROW_STEP = 16  # columns of the built-in engine's cache come in multiples of this
ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """Devices of the trainer and of the servers."""

    machine: Machine
    trainer: int = 1  # ranks of a trained model
    servers: int = 0  # replicas
    server_devices: int = 1  # of each
    shared: bool = True  # trainer and servers are on the same devices

    @property
    def devices(self) -> int:
        """All devices of the run."""
        served = self.servers * self.server_devices
        return max(self.trainer, served) if self.shared else self.trainer + served


def placement_of(config: Any, machine: Machine, ranks: int = 0) -> DevicePlacement:
    """Place a run as its settings do; a run in one process takes the whole `machine` where it has several devices.

    `ranks`: number of ranks that torchrun launched, on all machines; 0 without torchrun. Raises ConfigError for a model
    that a service holds.
    """
    if not config.actor.backend.computes_here:
        raise ConfigError(
            f"runtime.backend={config.runtime.backend.name}: the model is on a service, not on this machine"
        )
    runtime, rl = config.runtime.backend, isinstance(config, PolicyRunConfig)
    ray = isinstance(runtime, RaySettings)
    trainer = runtime.devices * runtime.nodes if ray else machine.total
    if ranks and not ray:
        trainer = ranks
    if not rl:
        return DevicePlacement(machine, trainer)
    pools = runtime.pools if ray else {}
    served = next((pool for name, pool in pools.items() if ROLLOUT in pool.members(name)), None)
    apart = served is not None or (is_asynchronous(config) and not machine.is_cpu and has_servers(config.rollout))
    size = config.rollout.tensor_parallel
    replicas = config.rollout.replicas
    if not ray and not apart and machine.total > 1:
        replicas = max(machine.total // size, 1)
    return DevicePlacement(machine, trainer, replicas, size, shared=not apart)


def width_of(dtype: str, machine: Machine) -> int:
    """Bytes of a number in forward and backward; `auto` as this machine resolves it, or bfloat16 elsewhere."""
    if dtype == AUTO:
        dtype = compute_dtype(AUTO, current_platform()) if machine.is_cpu else "bfloat16"
    return WIDTHS[dtype]


def moments_of(optimizer: OptimizerConfig) -> float:
    """Optimizer state per weight, in stored weights."""
    if optimizer.name in EIGHT_BIT:
        return EIGHT_BIT[optimizer.name] * CODE
    if optimizer.name == "SGD" and optimizer.options.get("momentum"):
        return 1.0
    return STATES.get(optimizer.name, MOMENTS)


class Models:
    """The roles of a run on its devices."""

    def __init__(self, config: Any, sizes: Sizes, placement: DevicePlacement) -> None:
        self._config = config
        self._sizes = sizes
        self._placement = placement
        self._rl = isinstance(config, PolicyRunConfig)

    def passes(self) -> list[Pass]:
        """The policy first, then the others, each with its forwards and its passes with a backward in a step."""
        return list(self._policy_passes() if self._rl else self._supervised_passes())

    def _policy_passes(self) -> Iterator[Pass]:
        config = self._config
        algorithm, distillation = algorithm_of(config), distillation_of(config)
        stages = {stage.name for stage in declared_stages(config, algorithm, distillation)}
        epochs = float(config.update.epochs)
        own = "reference" in self._sizes.models
        on_policy = "reference" in stages and not own and is_its_own_reference(config.actor)
        actor = self._role(POLICY, config.model, config.actor)
        yield Pass(actor, float("actor" in stages) + float(on_policy), epochs)
        if "critic" in stages:
            critic = config.critic
            role = self._role("critic", critic.model or config.model, critic.engine, values=True)
            yield Pass(role, 1.0, epochs)
        if "reference" in stages and not on_policy:
            reference = config.reference.model if config.reference is not None else None
            yield Pass(self._frozen("reference", reference or config.model, config.actor), 1.0)
        for name, one in (config.distillation.teachers if config.distillation is not None else {}).items():
            if one.served_by == "engine":
                yield Pass(self._frozen(f"teacher {name}", one.model, one.engine or config.actor), 1.0)
        if config.process_reward is not None:
            one = config.process_reward
            yield Pass(self._role("process_reward", one.model or config.model, one.engine), 1.0, 1.0)
        for name, one in config.reward.components.items():
            if one.model is not None and one.model.place == "colocated":
                engine = EngineConfig(
                    max_tokens_per_microbatch=one.model.max_tokens_per_batch, compute_dtype=one.model.compute_dtype
                )
                model = ModelConfig(path=one.model.path)
                yield Pass(replace(self._frozen(f"reward {name}", model, engine), values=True), 1.0)

    def _supervised_passes(self) -> Iterator[Pass]:
        config = self._config
        values = config.kind == "reward_model"
        actor = self._role(POLICY, config.model, config.actor, values=values)
        live = config.kind == "prefer" and config.reference.logprobs == "live"
        needed = config.kind == "prefer" and getattr(config.loss, "needs_reference", True)
        own = config.kind == "prefer" and (config.reference.model is not None or not is_its_own_reference(config.actor))
        yield Pass(actor, float(live and needed and not own), 1.0)
        if live and needed and own:
            yield Pass(self._frozen("reference", config.reference.model or config.model, config.actor), 1.0)

    def _frozen(self, name: str, model: ModelConfig, engine: EngineConfig) -> Role:
        return replace(self._role(name, model, engine), trained=False, adapter=0, four_bit=False)

    def _role(self, name: str, model: ModelConfig, engine: EngineConfig, values: bool = False) -> Role:
        anatomy = self._sizes.models.get(name) or self._sizes.models[POLICY]
        layout = engine.backend.layout(self._placement.trainer)
        lora = engine.lora
        budget = packed_tokens(self._config, engine, self._sizes.lengths, self._placement.machine)
        tokens, count = microbatch_tokens(self._config, self._sizes.lengths, budget, layout)
        return Role(
            name,
            anatomy,
            stored=WIDTHS[model.dtype],
            computed=width_of(engine.compute_dtype, self._placement.machine),
            moments=moments_of(engine.optimizer),
            adapter=0 if lora is None else adapted(anatomy, lora.rank, lora.targets),
            four_bit=lora is not None and lora.quantise is not None,
            layout=layout,
            tokens=tokens,
            microbatches=count,
            recompute=bool(engine.activation_checkpointing),
            keeps_inputs=engine.activation_checkpointing != "offload",
            chunk=engine.logprob_chunk_tokens,
            offload=bool(getattr(engine.backend, "offload", False)),
            values=values,
        )


def adapted(anatomy: Anatomy, rank: int, targets: Any) -> int:
    """Parameters of a LoRA adapter on the linear layers that `targets` names."""
    if targets == "all-linear":
        return anatomy.lora_parameters(rank)
    layers = [one for one in anatomy.linear if one[0] in targets]
    return sum(count * rank * (inputs + outputs) for _, count, inputs, outputs in layers) or rank


def step_sequences(config: Any) -> int:
    """Sequences that one step trains on."""
    if isinstance(config, PolicyRunConfig):
        return config.update.prompts_per_step * config.update.samples_per_prompt
    return int(config.samples_per_step)


def microbatch_tokens(config: Any, lengths: Lengths, budget: int, layout: Layout) -> tuple[int, int]:
    """Tokens of a rank's row in its fullest micro-batch, and the micro-batches of an optimizer step."""
    rl = isinstance(config, PolicyRunConfig)
    sequences = step_sequences(config) * (1 if rl else lengths.sequences)
    updates = config.update.minibatches if rl else 1
    whole = sequences * lengths.sequence / updates / (layout.replicate * layout.shard)
    counted = min(float(budget), whole)
    row = counted * _shared(config, lengths, counted)
    return max(math.ceil(row / layout.sequence), 1), max(math.ceil(whole / budget), 1)


def packed_tokens(config: Any, engine: EngineConfig, lengths: Lengths, machine: Machine) -> int:
    """Tokens up to which sequences share a micro-batch; a run reads the largest group with its data."""
    group = config.update.samples_per_prompt if isinstance(config, PolicyRunConfig) else 1
    largest = group * (lengths.prompt_max + lengths.response_max * lengths.sequences)
    return engine.packed_tokens(largest, "cpu" if machine.is_cpu else "")


def shared_tokens(config: Any, lengths: Lengths, policy: Role, machine: Machine) -> float:
    """Tokens of a row for each counted token: the budget counts every sequence in full, and a group shares its prompt.

    Layers with a state compute each sequence in full.
    """
    if policy.anatomy.stateful:
        return 1.0
    return _shared(config, lengths, float(packed_tokens(config, config.actor, lengths, machine)))


def _shared(config: Any, lengths: Lengths, counted: float) -> float:
    group = config.update.samples_per_prompt if isinstance(config, PolicyRunConfig) else lengths.sequences
    together = max(min(counted / max(lengths.sequence, 1.0), float(group)), 1.0)
    return (lengths.prompt + together * lengths.response) / (together * max(lengths.sequence, 1.0))


def serving_of(config: PolicyRunConfig, sizes: Sizes, placement: DevicePlacement) -> Serving:
    """The rollout engine on a device."""
    rollout, anatomy = config.rollout, sizes.models[POLICY]
    asks = rollout.sleep_while_training
    sleeps = asks != "none" and not (asks == "auto" and placement.machine.is_cpu)
    if rollout.backend != "builtin":
        share = next((float(rollout.engine[name]) for name in SHARES if name in rollout.engine), SHARE)
        return Serving(reserved=share, sleeps=sleeps, buckets=2 * config.weights.bucket_mib * 2**20)
    settings = rollout.builtin
    width = (
        width_of(config.actor.compute_dtype, placement.machine) if settings.dtype == "auto" else WIDTHS[settings.dtype]
    )
    rows, columns = cache_size(config, sizes.lengths)
    step = max(
        rows * anatomy.vocabulary * FLOAT32 * 4,
        min(settings.prefill_tokens, rows * sizes.lengths.prompt_max) * 8 * anatomy.hidden * width,
    )
    return Serving(
        weights=width * anatomy.parameters,
        adapted=_merged_bytes(config, anatomy, width),
        cache=rows * columns * anatomy.kv_bytes_per_token(width),
        work=round(step),
        sleeps=sleeps,
    )


def _merged_bytes(config: PolicyRunConfig, anatomy: Anatomy, width: int) -> int:
    """An adapter that the built-in engine merges, and its copy of the base of each weight that this changes."""
    lora = config.actor.lora
    if lora is None or lora.sync == "merged":
        return 0
    layers = [one for one in anatomy.linear if lora.targets == "all-linear" or one[0] in lora.targets]
    base = width * sum(count * inputs * outputs for _, count, inputs, outputs in layers)
    return base + WIDTHS[config.model.dtype] * adapted(anatomy, lora.rank, lora.targets)


def cache_size(config: PolicyRunConfig, lengths: Lengths) -> tuple[int, int]:
    """Rows and columns that the built-in engine's cache grows to."""
    settings = config.rollout.builtin
    columns = lengths.prompt_max + config.rollout.sampling.max_response_tokens
    columns = -(-min(columns, settings.max_sequence_tokens or columns) // ROW_STEP) * ROW_STEP
    ahead = 1 + (config.asynchrony.staleness if config.asynchrony is not None else 0)
    asked = step_sequences(config) * ahead // config.rollout.replicas
    return max(min(settings.slots, asked, settings.kv_cache_tokens // columns), 1), columns


def cached_columns(lengths: Lengths) -> float:
    """Columns of the cache that the built-in engine reads for an answer in a decode step, on average."""
    return lengths.prompt + lengths.response / 2 + ROW_STEP / 2


def setup_of(config: Any, sizes: Sizes, placement: DevicePlacement, base: int = 0) -> Setup:
    """Everything on a device of the trainer. A server in a process of its own on a CPU is another process."""
    passes = Models(config, sizes, placement).passes()
    serving, sent = None, 0
    if isinstance(config, PolicyRunConfig):
        outside = placement.machine.is_cpu and has_servers(config.rollout)
        serving = serving_of(config, sizes, placement) if placement.shared and not outside else None
        if outside and is_asynchronous(config):
            merged = config.actor.lora is None or config.actor.lora.sync == "merged"
            weights = passes[0].role.anatomy.parameters if merged else passes[0].role.adapter
            sent = weights * width_of(config.actor.compute_dtype, placement.machine)
    device = placement.machine.device
    return Setup(
        roles=[one.role for one in passes],
        serving=serving,
        on_cpu=placement.machine.is_cpu,
        base=base + round(device.context_gib * 2**30),
        device_bytes=device.memory_bytes,
        sent=sent,
    )


def not_counted(config: Any) -> list[str]:
    """Uses of memory and time that a forecast leaves out."""
    found: list[str] = []
    if isinstance(config, PolicyRunConfig):
        processes = [
            name for name, one in config.reward.components.items() if one.model and one.model.place == "process"
        ]
        teachers: Mapping[str, Any] = {} if config.distillation is None else config.distillation.teachers
        served = [name for name, one in teachers.items() if one.served_by == "rollout"]
        found += [f"reward model {name} in its own process" for name in processes]
        found += [f"teacher {name} on a rollout engine" for name in served]
        if config.episode.env.name != "chat":
            found.append(f"turns and tools of the environment {config.episode.env.name}")
        if config.algorithm.dynamic_sampling is not None:
            found.append("groups that dynamic sampling replaces")
    if config.model.use is not None and config.model.use.vision is not None:
        found.append("images")
    return found


__all__ = [
    "DevicePlacement",
    "Models",
    "cache_size",
    "cached_columns",
    "microbatch_tokens",
    "not_counted",
    "placement_of",
    "serving_of",
    "setup_of",
    "shared_tokens",
    "step_sequences",
    "width_of",
]
