"""Registries: a name in a run file becomes a class or function, imported only when it is chosen.

Every swappable part (advantage estimators, losses, engines, rollout engines, rewards, trackers, platforms) has one
`Registry`, created in its package's `__init__`. A plug-in adds to them from the entry-point group `hone.plugins` or
from a module named in `HONE_USE_EXTERNAL_MODULES`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

PLUGIN_GROUP = "hone.plugins"
PLUGIN_VARIABLE = "HONE_USE_EXTERNAL_MODULES"


class UnknownName(ValueError):
    """A name that no entry of a registry has."""


class CannotLoad(ImportError):
    """An entry exists, but its module or attribute cannot be imported here."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a registered thing is, where its settings class is, and what must be importable for it to work."""

    target: str | Any  # "module:attribute", or the object itself
    settings: str | Any = ""  # "module:attribute" of a Config subclass; empty: takes no settings
    requires: tuple[str, ...] = ()  # modules of optional packages that it cannot do without


class Registry:
    """Name -> lazily imported object, for one kind of part.

    >>> kinds = Registry("colour", {"red": "colorsys:rgb_to_hsv"})
    >>> kinds.get("red").__name__
    'rgb_to_hsv'
    """

    def __init__(self, kind: str, entries: Mapping[str, str | Entry] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}
        for name, entry in (entries or {}).items():
            self._entries[name] = entry if isinstance(entry, Entry) else Entry(entry)

    def register(self, name: str, target: str | Any, settings: str | Any = "", requires: tuple[str, ...] = ()) -> None:
        """Add an entry. A name is registered once: two parts that fight over one name are an error."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is already registered as {self._entries[name].target!r}")
        self._entries[name] = Entry(target, settings, requires)

    def get(self, name: str) -> Any:
        """The object registered under `name`.

        Raises UnknownName (with the nearest names) or CannotLoad (with the import's own reason).
        """
        entry = self._entry(name)
        missing = [module for module in entry.requires if importlib.util.find_spec(module) is None]
        if missing:
            raise CannotLoad(f"{self.kind} {name!r} needs {', '.join(missing)}, which is not installed")
        return self._load(name, entry.target)

    def settings(self, name: str) -> Any | None:
        """The settings class of `name`, or None if it takes none."""
        target = self._entry(name).settings
        return self._load(name, target) if target else None

    def probe(self) -> dict[str, str]:
        """For each name: empty if it can be imported here, else the reason why not."""
        reasons: dict[str, str] = {}
        for name in self._entries:
            try:
                self.get(name)
                reasons[name] = ""
            except CannotLoad as error:
                reasons[name] = str(error)
        return reasons

    def target(self, name: str) -> str:
        """Where the entry is, as text, without importing it. Raises UnknownName."""
        target = self._entry(name).target
        return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise UnknownName(unknown(self.kind, name, list(self)))
        return self._entries[name]

    def _load(self, name: str, target: str | Any) -> Any:
        if not isinstance(target, str):
            return target
        try:
            return resolve(target)
        except Exception as error:  # importing runs foreign code: a half-broken package raises whatever it likes
            raise CannotLoad(f"{self.kind} {name!r} ({target}) cannot be loaded: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An exception as one line; its class is named unless it is an import that failed, which says so itself."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {text}"


def unknown(kind: str, name: str, known: list[str]) -> str:
    """The one sentence for a name that does not exist: nearest first, then everything there is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}{hint} (there is: {', '.join(sorted(known)) or 'nothing'})"


def resolve(reference: str) -> Any:
    """The object that "package.module:attribute" or "path/to/file.py:attribute" names.

    Raises ImportError (module or file missing), AttributeError (no such attribute), ValueError (malformed), and
    whatever the module raises while it is imported.
    """
    module_name, separator, attribute = reference.rpartition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"{reference!r} should be 'package.module:name' or 'path/to/file.py:name'")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise AttributeError(unknown(f"name in {module_name}", part, public))
        found = getattr(found, part)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        file = Path(name.replace(".", "/") + ".py")
        if error.name == name.partition(".")[0] and file.is_file():
            hint = f"no module {name!r} is installed; a file of the current folder is named as {file}:attribute"
            raise ImportError(hint, name=error.name) from error
        raise


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"no file {path} (looked in {Path.cwd()})")
    name = f"hone_file_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_loaded_plugins: dict[str, str] | None = None


def load_plugins() -> dict[str, str]:
    """Import every plug-in once; {name: empty, or why it failed}. `hone doctor` shows the result.

    A plug-in registers its parts when it is imported; an entry point that names a callable is called without
    arguments. A broken plug-in does not stop hone (its parts are simply not there), but is never silent: the command
    line prints each failure as a warning.
    """
    global _loaded_plugins
    if _loaded_plugins is not None:
        return _loaded_plugins
    _loaded_plugins = {}
    for point in entry_points(group=PLUGIN_GROUP):
        _loaded_plugins[point.name] = _try_plugin(point.load)
    for name in filter(None, (part.strip() for part in os.environ.get(PLUGIN_VARIABLE, "").split(","))):
        _loaded_plugins[name] = _try_plugin(lambda name=name: importlib.import_module(name))
    return _loaded_plugins


def _try_plugin(load: Any) -> str:
    try:
        loaded = load()
        if callable(loaded):
            loaded()
    except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises is its failure, reported as such)
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""
