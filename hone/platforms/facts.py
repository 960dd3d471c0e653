"""A platform's table of facts, each with the source it was found in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hone.platforms.base import PlatformBase

FACTS = (
    "device",
    "vendor",
    "architectures",
    "dtypes",
    "attention_kernels",
    "fused_optimizers",
    "grouped_products",
    "compiles_triton",
    "records_graphs",
    "allocator_variable",
    "collectives_backend",
    "supports_broadcast",
    "supports_ipc",
    "visible_devices_variable",
    "ray_resource",
    "ray_override_variables",
    "profiler_activity",
    "container",
)
"""The attributes of a platform that are facts about its devices."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a platform's table."""

    name: str
    value: Any
    source: str  # upstream file, document or measurement; "" if the platform names none


def facts_of(platform: PlatformBase) -> list[Fact]:
    """Every fact about the platform, with its source."""
    return [Fact(name, getattr(platform, name), platform.sources.get(name, "")) for name in FACTS]
