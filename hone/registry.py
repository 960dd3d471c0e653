"""Registries: map a name in a run file to a class or function, imported only when it is chosen.

Every swappable part (advantage estimators, losses, engines, rollout engines, rewards, trackers, platforms) has one
`Registry`, created in its package's `__init__`. Plug-ins (`hone.plugins`) add entries: a registry loads them before it
lists its names, and before it calls a name unknown.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.plugins import elsewhere, how_to_get, load_plugins

SHORTEST_BEGINNING = 3  # characters of a name that is taken for the beginning of another
_FILE_MODULE = "hone_file_"  # the names of modules that were loaded by path begin with it


class UnknownName(ValueError):
    """A name that is not registered."""


class CannotLoad(ImportError):
    """A registered name whose module or attribute cannot be imported here."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Locations of a registered object and its settings class, and the optional modules that it needs."""

    target: str | Any  # "module:attribute", or the object itself
    settings: str | Any = ""  # "module:attribute" of a Config subclass; empty: takes no settings
    requires: tuple[str, ...] = ()  # modules of optional packages that it needs


class Registry:
    """Names of one kind of part, each mapped to an object that is imported when it is asked for.

    >>> kinds = Registry("colour", {"red": "colorsys:rgb_to_hsv"})
    >>> kinds.get("red").__name__
    'rgb_to_hsv'
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, str | Entry] | None = None,
        base: Registry | None = None,
        settings: str = "",
        files: bool = False,
    ) -> None:
        """The names of `base`, now and later, belong to this registry too; `settings`: the class of who names none.

        `files`: `path/to/file.py:name` is a name too.
        """
        self.kind = kind
        self.references = files  # whether a name may also be a reference to an object that is not registered
        self._files = files
        self._base = base
        self._settings = settings
        self._entries: dict[str, Entry] = {}
        for name, entry in (entries or {}).items():
            self._entries[name] = entry if isinstance(entry, Entry) else Entry(entry)

    def register(self, name: str, target: str | Any, settings: str | Any = "", requires: tuple[str, ...] = ()) -> None:
        """Add an entry. Raises ValueError if the name is taken."""
        if self.has(name):
            raise ValueError(f"{self.kind} {name!r} is already registered as {self._entry(name).target!r}")
        self._entries[name] = Entry(target, settings, requires)

    def get(self, name: str) -> Any:
        """The object registered under `name`.

        Raises UnknownName (with the nearest name) or CannotLoad (with the reason).
        """
        entry = self._entry(name)
        missing = [module for module in entry.requires if importlib.util.find_spec(module) is None]
        if missing:
            packages = " ".join(module.replace("_", "-") for module in missing)
            raise CannotLoad(
                f"{self.kind} {name!r} needs {', '.join(missing)}, which is not installed: pip install {packages}"
            )
        return self._load(name, entry.target)

    def settings(self, name: str) -> Any | None:
        """The settings class of `name`, or None if it takes none."""
        target = self._entry(name).settings or self._settings
        return self._load(name, target) if target else None

    def probe(self) -> dict[str, str]:
        """Import every entry: name -> the reason if that fails, else an empty string."""
        reasons: dict[str, str] = {}
        for name in self:
            try:
                self.get(name)
                reasons[name] = ""
            except CannotLoad as error:
                reasons[name] = str(error)
        return reasons

    def target(self, name: str) -> str:
        """Return the entry's location, "module:attribute", without importing it. Raises UnknownName."""
        target = self._entry(name).target
        return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(sorted({*self._entries, *(self._base or ())}))

    def __contains__(self, name: str) -> bool:
        if not self.has(name):
            load_plugins()
        return self.has(name)

    def has(self, name: str) -> bool:
        """Return whether a name is registered so far: registrations must not load the plug-ins that they are in."""
        known = name in self._entries or (self._base is not None and self._base.has(name))
        return known or (self._files and ".py:" in name)

    def _entry(self, name: str) -> Entry:
        if name not in self:
            raise UnknownName(unknown(self.kind, name, list(self)))
        if name not in self._entries and self._base is not None and self._base.has(name):
            return self._base._entry(name)
        return self._entries.get(name) or Entry(name)

    def _load(self, name: str, target: str | Any) -> Any:
        if not isinstance(target, str):
            return target
        try:
            return resolve(target)
        except Exception as error:  # importing runs foreign code, which may raise anything
            raise CannotLoad(f"{self.kind} {name!r} ({target}) cannot be loaded: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An exception on one line. Names its class, except for import errors, whose text is clear without it."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {text}"


def unknown(kind: str, name: str, known: list[str]) -> str:
    """The error message for an unknown name: the plug-in that has it, or the nearest name and all known ones."""
    plugins = {name: plugin for name, plugin in elsewhere(kind).items() if name not in known}
    if name in plugins:
        return f"unknown {kind} {name!r}: it is in {how_to_get(plugins[name])}"
    short = name.removesuffix("s")
    begun = [one for one in known if len(short) >= SHORTEST_BEGINNING and one.startswith(short)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(name, [*known, *plugins], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if near and near[0] in plugins:
        hint = f"; did you mean {near[0]!r}, in {how_to_get(plugins[near[0]])}"
    return f"unknown {kind} {name!r}{hint} (there is: {', '.join(sorted(known)) or 'nothing'})"


def resolve(reference: str) -> Any:
    """Import the object that "package.module:attribute" or "path/to/file.py:attribute" names.

    Raises ImportError (no such module or file), AttributeError (no such attribute), ValueError (not of this form), and
    any error that the module raises during import.
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
            hint = f"no module {name!r} is installed; to use the file in the current folder, write {file}:attribute"
            raise ImportError(hint, name=error.name) from error
        raise


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"no file {path} (current folder: {Path.cwd()})")
    name = f"{_FILE_MODULE}{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _neighbours(path.resolve().parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Let a file import the files beside it. They are forgotten afterwards, because other folders have namesakes."""
    before = set(sys.modules)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == folder and not name.startswith(_FILE_MODULE):
                del sys.modules[name]
