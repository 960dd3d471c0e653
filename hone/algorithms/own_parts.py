"""Estimators and losses of the user: a run file names them as `path/to/file.py:name`, without a package.

    def name(batch)                              a function without settings
    def name(batch, settings: NameSettings)      a function with settings, whose class its annotation names
    class name(AdvantageSettings): __call__      a settings class whose objects are called with the batch

A policy loss takes `LossInputs` in place of the batch. This file imports no torch.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config import Config, ConfigError, plain
from hone.registry import CannotLoad, Entry, Registry, UnknownName, reason, resolve


@dataclass(frozen=True, slots=True)
class Contract:
    """Arguments and result of such a part. Classes are "module:name", imported when a run chooses a part of its own."""

    settings: str  # base class of its settings
    argument: str  # its first parameter, as an error shows it
    mask: str  # attribute of this argument with the loss mask, [T]
    result: str  # class of what it returns
    values: str  # attribute of the result, [T]

    @property
    def shown(self) -> str:
        """The function that is expected, as one line of Python."""
        settings, result = (one.partition(":")[2] for one in (self.settings, self.result))
        return f"def name({self.argument}, settings: {settings}) -> {result}; settings may be left out"


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A part from a user's file, called like a registered one. Its result is checked, because nobody else has."""

    where: str  # "policy loss 'my.py:name'"
    contract: Contract
    settings: Any  # its settings class
    function: Callable[..., Any]
    takes_settings: bool

    def __call__(self, given: Any, settings: Any) -> Any:
        """Raises ConfigError for a result of another class, or not of one value per token."""
        returned = self.function(given, settings) if self.takes_settings else self.function(given)
        cls = resolve(self.contract.result)
        tokens = tuple(getattr(given, self.contract.mask).shape)
        values = getattr(returned, self.contract.values, None) if isinstance(returned, cls) else None
        shape = tuple(getattr(values, "shape", ()))
        if values is None or shape != tokens:
            found = type(returned).__name__ if values is None else f"{self.contract.values} of shape {list(shape)}"
            raise ConfigError(
                f"{self.where} returned {found}; expected {cls.__name__} with {self.contract.values} of shape "
                f"{list(tokens)}, one value per token"
            )
        return returned


class OpenRegistry(Registry):
    """A registry whose parts may also be named as `package.module:name` or `path/to/file.py:name`."""

    def __init__(self, kind: str, entries: Mapping[str, str | Entry], contract: Contract) -> None:
        super().__init__(kind, entries)
        self.references = True
        self._contract = contract

    def get(self, name: str) -> Any:
        return self._own(name) if ":" in name else super().get(name)

    def settings(self, name: str) -> Any:
        """The settings class of a part; for one that takes no settings, the base class of the others'."""
        return self._own(name).settings if ":" in name else super().settings(name) or resolve(self._contract.settings)

    def target(self, name: str) -> str:
        return name if ":" in name else super().target(name)

    def _entry(self, name: str) -> Entry:
        try:
            return super()._entry(name)
        except UnknownName as error:
            raise UnknownName(f"{error}, or 'path/to/file.py:function' of your own") from error

    def _own(self, reference: str) -> OwnPart:
        """Load a part of the user. Raises CannotLoad for a missing file or name, or another signature."""
        where = f"{self.kind} {reference!r}"
        try:
            found = resolve(reference)
        except Exception as error:  # importing runs foreign code, which may raise anything
            raise CannotLoad(f"{where} cannot be loaded: {reason(error)}") from error
        base = resolve(self._contract.settings)
        try:
            if inspect.isclass(found):
                return OwnPart(where, self._contract, _callable_settings(found, base), _call_settings, True)
            settings = _settings_of(found, base)
        except TypeError as error:
            raise CannotLoad(f"{where} {error}; expected {self._contract.shown}") from error
        return OwnPart(where, self._contract, settings or base, found, settings is not None)


def portable_settings(config: Config) -> dict[str, Any]:
    """An algorithm's settings as plain data for a process in another folder; empty if its loss is a registered one."""
    given = plain(config)
    return {**given, "loss": _absolute_names(given["loss"])} if _names_own_part(given["loss"]) else {}


def _names_own_part(data: Any) -> bool:
    if not isinstance(data, Mapping):
        return False
    return ":" in str(data.get("name", "")) or any(_names_own_part(value) for value in data.values())


def _absolute_names(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    return {key: _absolute(value) if key == "name" else _absolute_names(value) for key, value in data.items()}


def _absolute(name: Any) -> Any:
    file, separator, attribute = str(name).rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if separator and file.endswith(".py") else name


def _call_settings(given: Any, settings: Any) -> Any:
    return settings(given)


def _callable_settings(cls: type, base: type) -> type:
    """The class, if it is a settings class whose objects can be called. Raises TypeError."""
    if not issubclass(cls, base):
        raise TypeError(f"is a class that does not extend {base.__name__}")
    if "__call__" not in dir(cls):
        raise TypeError("is a settings class without a method __call__")
    _ = _parameters(cls.__call__, 2)  # itself, and what it is called with
    return cls


def _settings_of(function: Any, base: type) -> type | None:
    """The settings class in the annotation of the second parameter; None for one parameter. Raises TypeError."""
    if not callable(function):
        raise TypeError(f"is a {type(function).__name__}, not a function")
    names = _parameters(function, 1, 2)
    if len(names) == 1:
        return None
    try:
        found = typing.get_type_hints(function).get(names[1])
    except NameError as error:
        raise TypeError(f"has an annotation that cannot be read ({error})") from error
    if not (inspect.isclass(found) and issubclass(found, base)):
        annotated = "no annotation" if found is None else f"the annotation {getattr(found, '__name__', found)}"
        raise TypeError(f"has {annotated} at its parameter {names[1]!r}, not a class that extends {base.__name__}")
    return found


def _parameters(function: Any, *counts: int) -> list[str]:
    """The names of the parameters, which must be positional and one of `counts` many. Raises TypeError."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise TypeError("has no signature that can be read") from error
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(named) not in counts or len(named) != len(parameters):
        raise TypeError(f"takes ({', '.join(map(str, parameters))})")
    return named
