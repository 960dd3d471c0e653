"""Every key that a run file of some kind can have, found from the settings classes and the registries.

settings class of a kind --> its sections, each with its path, its class and what has to be chosen for it to exist
                         '-> the keys that are meant by a path or by words
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from hone.config import Choice, Config, default_of
from hone.explain import registry_of, value_text
from hone.registry import CannotLoad, Registry


@dataclass(frozen=True, slots=True)
class KeySection:
    """One section of a run file: where it is, its class, and the object that its owner has as its default, if any."""

    path: str
    cls: type[Config]
    default: Config | None
    chosen: str = ""  # the registry entry that has these settings
    within: str = ""  # the registry entry whose settings contain this section
    same_as: str = ""  # the label of the section that lists the keys of this class

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def default_text(self, name: str) -> str:
        if isinstance(self.default, self.cls):
            return value_text(self.default.__dict__[name])
        return value_text(default_of(self.cls.model_fields[name]))


def sections(kind: str, settings: type[Config], seen: dict[type[Config], str]) -> list[KeySection]:
    """The sections of a run file of this kind. `seen`: the label of each class that an earlier section lists."""
    found: list[KeySection] = []
    _collect(KeySection("", settings, None), kind, seen, found)
    return found


def _collect(section: KeySection, kind: str, seen: dict[type[Config], str], found: list[KeySection]) -> None:
    if section.cls in seen:
        found.append(replace(section, same_as=seen[section.cls]))
        return
    seen[section.cls] = label(kind, section)
    found.append(section)
    within = section.chosen or section.within
    for name, info in section.cls.model_fields.items():
        owned = section.default.__dict__[name] if isinstance(section.default, section.cls) else default_of(info)
        for cls, place in _inside(info.annotation, section.key(name)):
            if (mark := registry_of(info)) is not None and issubclass(cls, Choice):
                for entry, settings in entries(mark.registry):
                    _collect(KeySection(place, settings, None, entry, within), kind, seen, found)
            else:
                inner = KeySection(place, cls, owned if isinstance(owned, cls) else None, within=within)
                _collect(inner, kind, seen, found)


def entries(registry: Registry) -> Iterator[tuple[str, type[Config]]]:
    """Entries of a registry that have settings, with their classes."""
    for entry in registry:
        try:
            settings = registry.settings(entry)
        except CannotLoad:
            continue  # a plug-in that cannot be imported here; `hone doctor` says why
        if settings is not None and set(settings.model_fields) - {"name"}:
            yield entry, settings


def _inside(annotation: Any, path: str) -> Iterator[tuple[type[Config], str]]:
    """The settings classes of a field, each with its path: `<name>` for an entry of a mapping, `<n>` for a list's."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation, path
        return
    place = {dict: f"{path}.<name>", list: f"{path}.<n>", tuple: f"{path}.<n>"}.get(get_origin(annotation), path)
    for inner in get_args(annotation):
        yield from _inside(inner, place)


def label(kind: str, section: KeySection) -> str:
    return (
        "-".join(filter(None, ["key", kind, section.path, section.within, section.chosen]))
        .replace("<", "")
        .replace(">", "")
    )


# ------------------------------------------------------------------------------------------------------ looked up


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One key that a run file can have."""

    section: KeySection
    name: str

    @property
    def path(self) -> str:
        return self.section.key(self.name)

    @property
    def info(self) -> FieldInfo:
        return self.section.cls.model_fields[self.name]

    @property
    def chosen(self) -> str:
        """The registry entry that has this key, if only one has it."""
        return self.section.chosen or self.section.within


def every_key(kind: str, settings: type[Config]) -> list[KnownKey]:
    """The keys of a kind of run. A settings class that is used in several places is listed at the first."""
    found = [one for one in sections(kind, settings, {}) if not one.same_as]
    return [KnownKey(one, name) for one in found for name in one.cls.model_fields if name != "name" or not one.chosen]


def at_path(kind: str, settings: type[Config], path: str) -> list[KnownKey]:
    """The keys at a dotted path, or in the section there; one for each registry entry that has it."""
    places = outer = [KeySection("", settings, None)]
    last = path
    for part in path.split("."):
        outer, last = places, part
        places = [inner for place in places for inner in _below(place, part)]
    inside = [KnownKey(one, name) for one in places for name in one.cls.model_fields]
    return inside or [KnownKey(one, last) for one in outer if last in one.cls.model_fields]


def _below(place: KeySection, part: str) -> list[KeySection]:
    """The sections at a key of a section: of each entry of a registry, or under a name of a mapping or a list."""
    if place.path.endswith(">"):
        return [replace(place, path=f"{place.path.rpartition('.')[0]}.{part}")]
    if part not in place.cls.model_fields:
        return []
    info, found = place.cls.model_fields[part], []
    for cls, path in _inside(info.annotation, place.key(part)):
        mark = registry_of(info) if issubclass(cls, Choice) else None
        if mark is None:
            found.append(KeySection(path, cls, None, within=place.chosen or place.within))
        else:
            found += [KeySection(path, one, None, entry) for entry, one in entries(mark.registry)]
    return found


def about(keys: list[KnownKey], asked: str) -> list[KnownKey]:
    """The keys with words that begin with all of these, in path or meaning; first those with them at the path's end."""
    wanted = _words(asked)

    def has_all(text: str) -> bool:
        there = _words(text)
        return bool(wanted) and all(any(word.startswith(one) for word in there) for one in wanted)

    found = [key for key in keys if has_all(f"{key.path} {key.info.description}")]
    return sorted(found, key=lambda key: not has_all(key.name))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
