"""`hone list`: the registered names, by kind, and the metrics. `hone doctor` uses the same table of registries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from hone.registry import CannotLoad, Registry, UnknownName, resolve, unknown
from hone.tracking.catalogue import METRICS as METRIC_ENTRIES

REGISTRIES = {
    "advantages": "hone.algorithms:ADVANTAGES",
    "losses": "hone.algorithms:POLICY_LOSSES",
    "preference_losses": "hone.algorithms:PREFERENCE_LOSSES",
    "reward_model_losses": "hone.algorithms:REWARD_MODEL_LOSSES",
    "distillation_losses": "hone.algorithms:DISTILLATION_LOSSES",
    "presets": "hone.algorithms.presets:PRESETS",
    "sources": "hone.data:SOURCES",
    "environments": "hone.envs:EPISODES",
    "parsers": "hone.envs:PARSERS",
    "rewards": "hone.rewards:REWARDS",
    "sandboxes": "hone.sandboxes:SANDBOXES",
    "engines": "hone.engines.registry:EngineRegistry",
    "schedules": "hone.engines.registry:SCHEDULES",
    "rollout": "hone.rollout:ROLLOUT_ENGINES",
    "transports": "hone.weights:TRANSPORTS",
    "runtimes": "hone.runtime:RUNTIMES",
    "trackers": "hone.tracking:TRACKERS",
    "platforms": "hone.platforms:PLATFORMS",
}
"""Kind -> where its registry is. Imported only when needed."""
METRICS = "metrics"  # a kind of `hone list` that is no registry


@dataclass(frozen=True, slots=True)
class Registered:
    """One name that a run file may use."""

    name: str
    where: str  # module:attribute


def listing(
    kind: Annotated[
        str, typer.Argument(help=f"one of {', '.join(REGISTRIES)}, {METRICS}; default: all but metrics")
    ] = "",
) -> None:
    """List the names that a run file may use, by kind, and where each is defined; or the metrics and what they mean."""
    if kind == METRICS:
        _list_metrics()
        return
    if kind and kind not in REGISTRIES:
        raise UnknownName(unknown("kind", kind, [*REGISTRIES, METRICS]))
    for shown in [kind] if kind else REGISTRIES:
        entries = list(registered(shown))
        width = max((len(entry.name) for entry in entries), default=0)
        typer.secho(shown, bold=True)
        for entry in entries:
            typer.echo(f"  {entry.name:<{width}}  {entry.where}")


def _list_metrics() -> None:
    width = max(len(one.name) for one in METRIC_ENTRIES)
    for one in METRIC_ENTRIES:
        kind = f"{one.reducer}, {one.unit}" if one.unit else str(one.reducer)
        typer.echo(f"{one.name:<{width}}  {one.meaning} ({kind})")


def registered(kind: str) -> Iterator[Registered]:
    """Every name of a kind, sorted. Imports the registry, but none of its entries."""
    registry = resolve(REGISTRIES[kind])
    if isinstance(registry, Registry):
        for name in registry:
            yield Registered(name, registry.target(name))
    elif kind == "engines":
        for key in registry:
            yield Registered(engine_name(key), registry.target(key))
    else:  # presets: plain data
        for name in sorted(registry):
            yield Registered(name, REGISTRIES[kind])


def engine_name(key: tuple[str, str, str, str]) -> str:
    """An engine's key as text: backend, model type, and the devices that it supports."""
    model_type, backend, device, vendor = key
    devices = "" if device == "*" else f" on {device}" + ("" if vendor == "*" else f" by {vendor}")
    return f"{backend} {model_type}{devices}"


def problems(kind: str) -> dict[str, str]:
    """Import every entry of a kind: name -> why it cannot be imported here (empty if it can)."""
    registry: Any = resolve(REGISTRIES[kind])
    if isinstance(registry, Registry):
        return registry.probe()
    found = {}
    for key in registry if kind == "engines" else ():
        try:
            registry.find(*key)
            found[engine_name(key)] = ""
        except CannotLoad as error:
            found[engine_name(key)] = str(error)
    return found
