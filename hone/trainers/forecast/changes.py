"""Changes of a run file: those that make it fit, and the search for the fastest. Each is overrides to paste."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hone.config import ConfigError, build, plain
from hone.planner.devices import Machine
from hone.planner.memory import peak, phases
from hone.trainers.forecast.forecast import Forecast, Given, checked_setup, forecast, least_seconds
from hone.trainers.forecast.setup import DevicePlacement, packed_tokens, placement_of
from hone.trainers.forecast.sizes import POLICY, Sizes
from hone.trainers.policy.settings import PolicyRunConfig

Overrides = Mapping[str, Any]

BEST = 10
MESHES = 3  # of the trainer's devices, the fastest, which are tried with all servers
SIMULATED = 12  # candidates whose schedule is simulated, the fastest by the sum of their costs
DEGREES = (1, 2, 4, 8)
SPLITS = (0.25, 0.5, 0.75)  # the trainer's share of the devices
STALENESS = (1, 2, 4)
FASTER = 0.99  # of the seconds of a smaller staleness: what makes a larger one worth it


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
    """The fastest mappings and settings that fit, best first.

    Memory sorts out what does not fit, the sum of the costs what is slow, and the run's own schedule times the rest,
    with the smallest staleness that is as fast. Of all meshes on the same devices of the trainer, only the fastest are
    tried with every mapping of servers. Costs come from the facts of the device in every candidate, because its shape
    changes them.
    """
    told = replace(given, rates=given.rates if machine.total == 1 else None)
    rl = isinstance(config, PolicyRunConfig)
    meshes = _meshes(config, sizes, machine)
    found: list[tuple[float, Overrides, Sequence[Overrides]]] = []
    for trainer, servers, ahead in _policy_placements(config, machine) if rl else _PLACEMENTS:

        def fitting(
            candidates: Iterable[Overrides], ahead: Sequence[Overrides] = ahead
        ) -> list[tuple[float, Overrides, Sequence[Overrides]]]:
            tried = [(one, _tried(config, {**one, **ahead[0]}, sizes, machine, told)) for one in candidates]
            return [(least_seconds(*one, told), overrides, ahead) for overrides, one in tried if one is not None]

        first = sorted(fitting({**mesh, **trainer, **servers[0]} for mesh in meshes), key=lambda one: one[0])
        found += first
        found += fitting({**one, **more} for _, one, _ in first[:MESHES] for more in servers[1:])
    chosen = sorted(found, key=lambda one: one[0])[:SIMULATED]
    best = [_scheduled(config, overrides, ahead, sizes, machine, told) for _, overrides, ahead in chosen]
    return sorted(best, key=_step_seconds)[:BEST]


def _step_seconds(change: Change) -> float:
    return change.found.step_s if change.found else math.inf


def _scheduled(
    config: Any, mapping: Overrides, ahead: Sequence[Overrides], sizes: Sizes, machine: Machine, given: Given
) -> Change:
    """Time a mapping, with the first of `ahead` that the next one makes no faster."""
    best: Change | None = None
    for more in ahead:
        overrides = {**mapping, **more}
        tried = _tried(config, overrides, sizes, machine, given)
        if tried is None:
            break
        one = forecast(*tried, given)
        if best is not None and one.step_s > _step_seconds(best) * FASTER:
            break
        best = Change(overrides, one.peak_bytes, True, found=one)
    assert best is not None  # the first one was tried before
    return best


def _tried(
    config: Any, overrides: Overrides, sizes: Sizes, machine: Machine, given: Given
) -> tuple[Any, Sizes, DevicePlacement] | None:
    """Return what a forecast of the settings with overrides takes; None if they are refused or do not fit."""
    try:
        other = changed(config, overrides)
        placement = placement_of(other, machine)
        if placement.devices > machine.total or _peak(other, sizes, machine, given) > machine.device.memory_bytes:
            return None
    except ConfigError:
        return None
    return other, sizes, placement


def _meshes(config: Any, sizes: Sizes, machine: Machine) -> list[Overrides]:
    """Overrides of each mesh that the run's engine has dimensions for, and that divides the model."""
    backend, anatomy = config.actor.backend, sizes.models[POLICY]
    heads = {(one.heads, one.kv_heads) for one in anatomy.attention}
    now = getattr(backend, "parallel", None)

    def degrees(name: str, *fits: bool) -> list[int]:
        return [n for n in DEGREES if n <= machine.devices] if name in backend.dimensions and all(fits) else [1]

    shared = "context" if "context" in backend.dimensions else "sequence"
    found: list[Overrides] = []
    for replicate, tensor, tokens, pipeline, parts, expert in product(
        sorted({*degrees("replicate"), *([machine.nodes] if "replicate" in backend.dimensions else [])}),
        degrees("tensor", anatomy.tensor_plan),
        degrees(shared, not anatomy.stateful, not anatomy.index_size),
        degrees("pipeline"),
        degrees("virtual_pipeline"),
        [n for n in degrees("expert", anatomy.expert_plan) if max(anatomy.experts, 1) % n == 0],
    ):
        if not all(_shares(a, b, tensor, tokens) for a, b in heads):
            continue
        if pipeline * parts > anatomy.layers or (parts > 1 and pipeline == 1):
            continue
        mesh = {"replicate": replicate, "tensor": tensor, shared: tokens, "pipeline": pipeline}
        mesh |= {"virtual_pipeline": parts, "expert": expert}
        chosen = {
            f"actor.backend.parallel.{name}": size
            for name, size in mesh.items()
            if name in backend.dimensions and size != getattr(now, name, 1)
        }
        if shared == "context" and (tensor > 1) != getattr(now, "sequence", False):  # tensor ranks share tokens, too
            chosen["actor.backend.parallel.sequence"] = tensor > 1
        found.append(chosen)
    return found


def _shares(heads: int, pairs: int, tensor: int, sequence: int) -> bool:
    """Return whether tensor ranks divide the heads evenly, and sequence ranks the heads of each tensor rank."""
    if heads % tensor or pairs % tensor:
        return False
    pairs //= tensor
    return heads // tensor % sequence == 0 and (pairs % sequence == 0 or sequence % pairs == 0)


_Placements = Iterable[tuple[Overrides, Sequence[Overrides], Sequence[Overrides]]]
"""Devices of the trainer, each with the servers and the values of staleness that are tried with them."""

_PLACEMENTS: _Placements = [({"actor.activation_checkpointing": one}, [{}], [{}]) for one in (False, True)]
"""Candidates for a run that generates nothing: every mesh, with and without activation checkpointing."""


def _policy_placements(config: PolicyRunConfig, machine: Machine) -> _Placements:
    """Servers that share the devices in turns, and servers on devices of their own that write answers ahead."""
    ahead = [_ahead(config, staleness) for staleness in STALENESS]
    if machine.total == 1:
        for recompute in (False, True):
            yield {"actor.activation_checkpointing": recompute}, [{}], [_ahead(config, 0), *ahead]
        return
    sizes = [size for size in DEGREES if size <= machine.devices]
    together = [_servers(machine.total // size, size) for size in sizes if machine.total % size == 0]
    yield _ray(machine.devices, machine.nodes), together, [_ahead(config, 0)]
    for trainer in dict.fromkeys(_trainer_devices(machine, split) for split in SPLITS):
        left, nodes = machine.total - trainer, max(trainer // machine.devices, 1)
        servers = [_servers(left // size, size) for size in sizes if left >= size and left % size == 0]
        apart = {"runtime.backend.pools.rollout.devices": left if machine.nodes == 1 else machine.devices}
        if machine.nodes > 1:
            apart["runtime.backend.pools.rollout.nodes"] = left // machine.devices
        if servers:
            yield {**_ray(trainer // nodes, nodes), **apart}, servers, ahead


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
