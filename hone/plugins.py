"""Plug-ins: packages that add parts to hone's registries, and where to find the plug-ins of this repository.

An installed plug-in has an entry point in the group `hone.plugins`, which names its module or a function of it. Without
an installation, the environment variable `HONE_USE_EXTERNAL_MODULES` names the same. The module says for which version
of the plug-in API it was written (`PLUGIN_API = 1`); hone compares that with `hone.PLUGIN_API` before it calls the
function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from hone import PLUGIN_API, __version__

GROUP = "hone.plugins"
VARIABLE = "HONE_USE_EXTERNAL_MODULES"

OURS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ascend": {"platform": ("ascend",)},
    "automodel": {"training engine": ("automodel",)},
    "environments": {
        "environment": ("gymnasium", "nemo_gym", "openenv", "textworld", "verifiers"),
        "data source": ("verifiers",),
    },
    "hosted-sandboxes": {"sandbox": ("daytona", "e2b", "modal", "sandbox_fusion")},
    "megatron": {"training engine": ("megatron",)},
    "nixl": {"weight transport": ("nixl",)},
    "sglang": {"rollout engine": ("sglang",)},
    "tinker": {"runtime": ("tinker",), "training engine": ("tinker",), "rollout engine": ("tinker",)},
    "torchtitan": {"training engine": ("torchtitan",)},
    "veomni": {"training engine": ("veomni",)},
}
"""Plug-in in the repository's folder plugins/ -> the names that it registers, by kind of part."""

NUMBERED_ACTIONS = "gymnasium"
"""The environment whose policy chooses among numbered actions."""

_loaded: dict[str, str] | None = None
_packages: dict[str, Path] = {}
_values: list[str] = []  # of the entry points that were loaded


class PluginRefused(ImportError):
    """A plug-in that was written for another version of the plug-in API."""


def load_plugins() -> dict[str, str]:
    """Import every plug-in once: name -> the reason if that fails, else an empty string.

    A plug-in registers its parts in the function that its entry point names, or when its module is imported. hone
    continues without the parts of a broken plug-in: every command prints a warning, `hone doctor` the reason.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    _loaded = {}
    named = filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(",")))
    points = [*entry_points(group=GROUP), *(EntryPoint(text, text, GROUP) for text in named)]
    values = set()
    for point in points:
        if point.value not in values:
            values.add(point.value)
            _loaded[point.name] = _load(point)
    return _loaded


def _load(point: EntryPoint) -> str:
    try:
        loaded = point.load()
        _require_api(point)
        if callable(loaded):
            loaded()
        _values.append(point.value)
        top = sys.modules[point.module.partition(".")[0]]
        if top.__file__ is not None:
            _packages[top.__name__] = Path(top.__file__).parent if hasattr(top, "__path__") else Path(top.__file__)
    except PluginRefused as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (foreign code may raise anything; the reason is reported)
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _require_api(point: EntryPoint) -> None:
    """Raise PluginRefused unless the plug-in's module names this version of the API.

    A module from the environment variable may leave it out: it lies beside the run that uses it.
    """
    declared = getattr(sys.modules[point.module], "PLUGIN_API", None)
    if declared == PLUGIN_API or (declared is None and point.dist is None):
        return
    found = f"has PLUGIN_API = {declared!r}" if declared is not None else "does not say PLUGIN_API"
    raise PluginRefused(
        f"{point.module} {found}, and hone {__version__} loads plug-ins with PLUGIN_API = {PLUGIN_API}; install "
        f"versions of hone-rl and {point.dist.name if point.dist else point.module} that fit each other"
    )


def environment() -> dict[str, str]:
    """The variable that lets a child in another Python load the plug-ins of this process, from `packages`."""
    load_plugins()
    return {VARIABLE: ",".join(_values)}


def packages() -> Mapping[str, Path]:
    """Name of each loaded plug-in's top package or module -> its folder or file."""
    load_plugins()
    return _packages


def elsewhere(kind: str) -> dict[str, str]:
    """Name of a part of this kind -> the plug-in of this repository that registers it."""
    return {name: plugin for plugin, kinds in OURS.items() for name in kinds.get(kind, ())}


def install_line(plugin: str) -> str:
    """The command that installs one of the plug-ins of this repository, for its root folder."""
    return f"pip install ./plugins/{plugin}"


def how_to_get(plugin: str) -> str:
    """The end of an error message: which plug-in has a part, and what to type, or why it failed."""
    failure = load_plugins().get(plugin, "")
    return f"the plug-in hone-{plugin}" + (
        f", which failed to load: {failure}" if failure else f": {install_line(plugin)}"
    )
