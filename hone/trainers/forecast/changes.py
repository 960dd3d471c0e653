"""Changes of a run file: those that make it fit, and the search for the fastest. Each is overrides to paste."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hone.config import ConfigError, build, plain
from hone.planner.devices import Machine
from hone.planner.memory import peak, phases
from hone.trainers.forecast.forecast import Forecast, Given, checked_setup, forecast, least_seconds
from hone.trainers.forecast.setup import packed_tokens, placement_of
from hone.trainers.forecast.sizes import POLICY, Sizes
from hone.trainers.policy.settings import PolicyRunConfig

Overrides = Mapping[str, Any]

BEST = 10
SIMULATED = 12  # candidates whose schedule is simulated, the fastest by the sum of their costs
DEGREES = (1, 2, 4, 8)
SPLITS = (0.25, 0.5, 0.75)  # the trainer's share of the devices
STALENESS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Change:
    """Overrides, and the forecast with them."""

    overrides: Overrides
    peak_bytes: int
    fits: bool
    saves: int = 0  # bytes of the peak
    found: Forecast | None = None  # in a search

    @property
    def text(self) -> str:
        """The overrides as a command line takes them."""
        return " ".join(f"{key}={_text(value)}" for key, value in self.overrides.items())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed(config: Any, overrides: Overrides) -> Any:
    """The settings with overrides; reading them does not count as reading the originals. Raises ConfigError."""
    data = plain(config)
    for key, value in overrides.items():
        *parents, last = key.split(".")
        place = data
        for name in parents:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        if last == "name" and place.get("name") != value and "." in key:
            place.clear()  # settings of the other choice
        place[last] = value
    return build(type(config), data, "hone plan")


def ways_to_fit(config: Any, sizes: Sizes, machine: Machine, given: Given) -> list[Change]:
    """Changes that lower the peak, the smallest first; one that fits, or all together, comes before those that do not.

    Only memory is computed.
    """
    before = _peak(config, sizes, machine, given)
    found: list[Change] = []
    together: dict[str, Any] = {}
    for overrides in _savings(config, sizes, machine):
        try:
            found.append(_saving(config, overrides, sizes, machine, given))
        except ConfigError:
            continue
        together |= overrides if found[-1].peak_bytes < before else {}
    if together and not any(one.fits for one in found):
        found.append(_saving(config, together, sizes, machine, given))
    saved = [replace(one, saves=before - one.peak_bytes) for one in found if one.peak_bytes < before]
    return sorted(saved, key=lambda one: not one.fits)  # stable: the smallest change comes first


def _peak(config: Any, sizes: Sizes, machine: Machine, given: Given) -> int:
    return peak(phases(checked_setup(config, sizes, placement_of(config, machine, given.ranks), given))).total


def _saving(config: Any, overrides: Overrides, sizes: Sizes, machine: Machine, given: Given) -> Change:
    size = _peak(changed(config, overrides), sizes, machine, given)
    return Change(overrides, size, fits=size <= machine.device.memory_bytes)


def _savings(config: Any, sizes: Sizes, machine: Machine) -> Iterator[Overrides]:
    """Changes that cost little first, and then those that change what is learnt."""
    engines = {"actor": config.actor}
    if isinstance(config, PolicyRunConfig) and config.critic is not None:
        engines["critic.engine"] = config.critic.engine
    unchecked = {
        f"{key}.activation_checkpointing": True for key, one in engines.items() if not one.activation_checkpointing
    }
    if unchecked:
        yield unchecked
    longest = sizes.lengths.prompt_max + sizes.lengths.response_max * sizes.lengths.sequences
    for divisor in (2, 4, 8):
        smaller = {
            f"{key}.max_tokens_per_microbatch": packed_tokens(config, one, sizes.lengths, machine) // divisor
            for key, one in engines.items()
        }
        if min(smaller.values()) >= longest:
            yield smaller
    if isinstance(config, PolicyRunConfig):
        if config.rollout.backend == "builtin":
            yield {"rollout.builtin.kv_cache_tokens": max(config.rollout.builtin.kv_cache_tokens // 4, longest, 64)}
        elif "mem_fraction_static" not in config.rollout.engine:
            yield {"rollout.engine.gpu_memory_utilization": 0.3}
    if not machine.is_cpu:
        yield {f"{key}.backend.offload": True for key in engines}
        if all(one.optimizer.name == "AdamW" for one in engines.values()):
            yield {f"{key}.optimizer.name": "AdamW8bit" for key in engines}
    if config.actor.lora is None:
        yield {"actor.lora.rank": 16}


def fastest(config: Any, sizes: Sizes, machine: Machine, given: Given) -> list[Change]:
    """The fastest mappings and settings that fit, best first; of each mapping of servers, the best mesh.

    Memory sorts out what does not fit, the sum of the costs what is slow, and the run's own schedule times the rest.
    Costs come from the facts of the device in every candidate, because its shape changes them.
    """
    rl = isinstance(config, PolicyRunConfig)
    candidates = _policy_candidates(config, sizes, machine) if rl else _parallel_candidates(sizes, machine)
    told = replace(given, rates=given.rates if machine.total == 1 else None)
    best: dict[str, tuple[float, Overrides, Any]] = {}
    for overrides in candidates:
        try:
            other = changed(config, overrides)
            placement = placement_of(other, machine)
            if placement.devices > machine.total or _peak(other, sizes, machine, told) > machine.device.memory_bytes:
                continue
            seconds = least_seconds(other, sizes, placement, told)
        except ConfigError:
            continue
        key = str(
            {name: value for name, value in overrides.items() if not name.startswith("actor.")} if rl else overrides
        )
        best[key] = min(best.get(key, (math.inf, {}, None)), (seconds, overrides, other), key=lambda one: one[0])
    chosen = sorted(best.values(), key=lambda one: one[0])[:SIMULATED]
    found = []
    for _, overrides, other in chosen:
        one = forecast(other, sizes, placement_of(other, machine), told)
        found.append(Change(overrides, one.peak_bytes, True, found=one))
    return sorted(found, key=lambda one: one.found.step_s if one.found else math.inf)[:BEST]


def _parallel_candidates(sizes: Sizes, machine: Machine) -> Iterator[Overrides]:
    """Meshes of the trained model over all devices, with and without checkpointing."""
    for tensor, sequence in _meshes(sizes, machine.devices):
        if machine.total % (tensor * sequence):
            continue
        for recompute in (False, True):
            yield {**_mesh(tensor, sequence), "actor.activation_checkpointing": recompute}


def _mesh(tensor: int, sequence: int) -> Overrides:
    sizes = {"tensor": tensor, "sequence": sequence}
    return {f"actor.backend.parallel.{name}": size for name, size in sizes.items() if size > 1}


def _meshes(sizes: Sizes, devices: int) -> list[tuple[int, int]]:
    """Degrees of tensor parallelism that divide the heads of every layer, each with those of sequence parallelism."""
    anatomy = sizes.models[POLICY]
    heads = {(one.heads, one.kv_heads) for one in anatomy.attention}
    fit = [n for n in DEGREES if n <= devices and all(a % n == 0 and b % n == 0 for a, b in heads)]
    return list(product(fit if anatomy.tensor_plan else [1], [1] if anatomy.stateful else DEGREES))


def _policy_candidates(config: PolicyRunConfig, sizes: Sizes, machine: Machine) -> Iterator[Overrides]:
    """Shared devices in turns, and devices apart with answers written ahead."""
    staleness = [0, *STALENESS]
    if machine.total == 1:
        for ahead, recompute in product(staleness, (False, True)):
            yield {**_ahead(config, ahead), "actor.activation_checkpointing": recompute}
        return
    meshes = [(tensor, sequence) for tensor, sequence in _meshes(sizes, machine.devices) if sequence <= 2]
    for (tensor, sequence), server in product(meshes, DEGREES):
        mesh = _mesh(tensor, sequence)
        if machine.total % server or server > machine.devices:
            continue
        yield {**mesh, **_ray(machine.devices, machine.nodes), **_servers(machine.total // server, server)}
        for split, ahead in product(SPLITS, STALENESS):
            trainer = _trainer_devices(machine, split)
            left = machine.total - trainer
            if trainer % (tensor * sequence) or left < server or left % server:
                continue
            nodes = max(trainer // machine.devices, 1)
            apart = {"runtime.backend.pools.rollout.devices": left if machine.nodes == 1 else machine.devices}
            if machine.nodes > 1:
                apart["runtime.backend.pools.rollout.nodes"] = left // machine.devices
            yield {
                **mesh,
                **_ray(trainer // nodes, nodes),
                **apart,
                **_servers(left // server, server),
                **_ahead(config, ahead),
            }


def _trainer_devices(machine: Machine, split: float) -> int:
    if machine.nodes > 1:
        return max(round(machine.nodes * split), 1) * machine.devices
    return max(round(machine.devices * split), 1)


def _ray(devices: int, nodes: int) -> Overrides:
    return {"runtime.backend.name": "ray", "runtime.backend.devices": devices, "runtime.backend.nodes": nodes}


def _servers(replicas: int, size: int) -> Overrides:
    return {"rollout.backend": "vllm", "rollout.replicas": replicas, "rollout.tensor_parallel": size}


def _ahead(config: PolicyRunConfig, staleness: int) -> Overrides:
    """Staleness, with the importance weights that older tokens need."""
    if not staleness:
        return {"asynchrony.staleness": 0} if config.asynchrony is not None else {}
    weights = config.algorithm.correction.weights
    extra = {} if weights is not None else {"algorithm.correction.weights": "token", "algorithm.correction.truncate": 2}
    return {"asynchrony.staleness": staleness, **extra}


__all__ = ["Change", "changed", "fastest", "ways_to_fit"]
