"""Options of another framework on one side, settings of a run file on the other, and what became of each option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.migration.shell.holes import holes, shown
from hone.other_frameworks import TABLES

Number = int | float


@dataclass(frozen=True, slots=True)
class Line:
    """One setting of the run file, and where its value comes from."""

    value: Any
    source: str


@dataclass(slots=True)
class Migration:
    """State of a migration. Readers of one subject take options and put settings."""

    options: Mapping[str, Any]
    framework: str = "verl"
    settings: dict[str, Line] = field(default_factory=dict)
    """Dotted key of hone -> value and source, in the order of writing."""
    mapped: dict[str, str] = field(default_factory=dict)
    """Option with a counterpart -> how the other framework was told."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Option that needs no counterpart -> the reason."""
    decisions: list[str] = field(default_factory=list)
    """Sentences about what a person has to decide, holes not included."""
    unset: dict[str, list[str]] = field(default_factory=dict)
    """Hole -> keys of the run file whose values have it."""
    decided_by_hand: set[str] = field(default_factory=set)
    """Options that a decision names."""
    notes: list[str] = field(default_factory=list)
    """Differences that need no decision, and what of the script was not read."""

    def __contains__(self, option: str) -> bool:
        return option in self.options

    @property
    def unknown(self) -> dict[str, Any]:
        """Options that no reader took, with their values."""
        taken = self.mapped.keys() | self.dropped.keys() | self.decided_by_hand
        return {name: value for name, value in self.options.items() if name not in taken}

    # ------------------------------------------------------------------------------------------------------ options

    def value(self, *names: str, default: Any = None) -> Any:
        """Take the value of the first option that is given, of several spellings of one. All given ones are taken."""
        given = [name for name in names if name in self.options]
        for name in given:
            self.mapped[name] = plain(self.options[name])
        return self.options[given[0]] if given else default

    def text(self, *names: str, default: str = "") -> str:
        """Take an option as text, with its holes as the script spells them."""
        value = self.value(*names)
        return default if value is None else str(value)

    def truth(self, *names: str, default: bool = False) -> bool:
        """Take an option as true or false; what is neither is a decision."""
        return bool(self._as(_truth, "true or false", names, default))

    def number(self, *names: str, default: Number | None = None) -> Any:
        """Take an option as a number; what is none is a decision."""
        return self._as(_number, "a number", names, default)

    def count(self, *names: str, default: int) -> int:
        """Take an option as a whole number above 0; what is none is a decision."""
        return int(self._as(_count, "a whole number above 0", names, default))

    def _as(self, convert: Callable[[Any], Any], expected: str, names: tuple[str, ...], default: Any) -> Any:
        value = self.value(*names)
        if value is None:
            return default
        try:
            return convert(value)
        except (TypeError, ValueError):
            name = next(name for name in names if name in self.options)
            self.decide(f"{name} is {plain(value)}, and should be {expected}; {_without(default)}", name)
            return default

    # ----------------------------------------------------------------------------------------------------- settings

    def put(self, key: str, value: Any, source: str) -> None:
        """Set a key of the run file. Text with a hole is written as it is, and is a decision."""
        for name in sorted(set(_holes_of(value))):
            self.unset.setdefault(name, []).append(key)
        name, separator, _ = source.partition("=")
        if separator and not self._gives(name):
            source = f"{source} ({self.framework}'s default)"
        self.settings[key] = Line(_shown(value), shown(source))

    def _gives(self, name: str) -> bool:
        """Return whether an option of this name, or one that ends in it, is given."""
        return any(option == name or option.endswith(f".{name}") for option in self.options)

    def undecided(self) -> list[str]:
        """Return every sentence about what a person has to decide, holes included."""
        holes_of = [
            f"{name} is known only when the script runs: write its value into {', '.join(dict.fromkeys(keys))}"
            + (f", or give it with --set {name.strip('${}')}=VALUE" if name.strip("${}").isidentifier() else "")
            for name, keys in self.unset.items()
        ]
        return [*holes_of, *self.decisions]

    def copy(self, name: str, key: str = "", convert: Callable[[Any], Any] | None = None) -> None:
        """Set a key to an option's value, if the option is given; without `key`, the one of the framework's table."""
        key = key or TABLES[self.framework][name][0]
        value = self.value(name)
        if value is None or name not in self.options:
            return
        source = f"{name}={plain(value)}"
        try:
            self.put(key, value if convert is None else convert(value), source)
        except (TypeError, ValueError):
            self.decide(f"{source} has no value for {key}", name)

    def drop(self, name: str, reason: str) -> None:
        """Note that an option needs no counterpart."""
        if name in self.options and name not in self.mapped:
            self.dropped.setdefault(name, reason)

    def decide(self, sentence: str, *names: str) -> None:
        """Note what a person has to decide, and the options that it is about."""
        for name in names:
            self.mapped.pop(name, None)
            self.decided_by_hand.add(name)
        if sentence not in self.decisions:
            self.decisions.append(sentence)


def number(value: Any) -> Number:
    """Convert an option's value to a number. Raises ValueError or TypeError."""
    return _number(value)


def _number(value: Any) -> Number:
    if isinstance(value, bool) or value is None:
        raise ValueError(value)
    if isinstance(value, int | float):
        return value
    found = float(str(value).strip())
    return int(found) if found.is_integer() and "e" not in str(value).lower() and "." not in str(value) else found


def plain(value: Any) -> str:
    """Return an option's value as text, with its holes as the script spells them."""
    return str(_shown(value))


def _holes_of(value: Any) -> list[str]:
    """Holes of a text, or of the texts in a list or a mapping."""
    if isinstance(value, str):
        return holes(value)
    inner = value if isinstance(value, list | tuple) else value.values() if isinstance(value, Mapping) else []
    return [name for one in inner for name in _holes_of(one)]


def _count(value: Any) -> int:
    found = _number(value)
    if found < 1 or found != int(found):
        raise ValueError(value)
    return int(found)


def _truth(value: Any) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False, "none": False}
    found = known.get(str(value).strip().lower())
    if found is None:
        raise ValueError(value)
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _shown(one) for key, one in value.items()}
    return value


def _without(default: Any) -> str:
    return "the run file has no value for it" if default is None else f"the run file is written as with {default}"
