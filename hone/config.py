"""Run files: frozen settings, composed from YAML and the command line, each value knowing where it came from.

    recipe.yaml  --defaults: base.yaml (one level)-->  merged mapping  --key=value overrides-->  Config tree
                                                             |
                                                        provenance: dotted key -> "default" | file | "command line"

A setting lives in a `Config` subclass beside the code that it configures; its default is written there and nowhere
else. Unknown keys are errors with the nearest valid key. A key that was set but that no part has read by the time the
run starts is an error too: parts read their settings in their constructors, and `Config` keeps note of what was read.

This file holds what a settings class is and how one is built and inspected; `hone.composition` reads and merges the
files, `hone.explain` tells people and editors about the keys.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SerializeAsAny, ValidationError
from pydantic.fields import FieldInfo

from hone.composition import COMMAND_LINE, ConfigError, Layer, read_layers, to_yaml
from hone.registry import CannotLoad, Registry, UnknownName

DEFAULT = "default"


class Config(BaseModel):
    """Base of every settings class: frozen, strict about keys, and aware of which of its fields were read."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    _reads: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("_") and name in type(self).__pydantic_fields__:
            private = super().__getattribute__("__pydantic_private__")
            if private is not None:
                private["_reads"].add(name)
        return value

    def __eq__(self, other: object) -> bool:
        """Same class, same values; which of them were read so far does not count."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @classmethod
    def underlay(cls, given: Mapping[str, Any]) -> Layer | None:
        """A layer below what was `given` for this section: how `preset: NAME` fills keys that nobody set.

        Raises ConfigError (without the source, which is added) if there is no such preset.
        """
        return None


class Choice(Config):
    """Settings of one named entry of a registry: `loss: {name: ppo, clip_low: 0.2}`, or just `loss: ppo`."""

    name: str = Field(description="which one")


@dataclass(frozen=True, slots=True)
class FromRegistry:
    """Marks a field as a choice among a registry's entries: `Annotated[Choice, FromRegistry(LOSSES)]`."""

    registry: Registry


def setting(default: Any = ..., meaning: str = "", *, unit: str = "", factory: Any = None, **constraints: Any) -> Any:
    """A field with its meaning and unit (for `hone config --explain`); constraints are pydantic's (ge, le, gt ...)."""
    extra: dict[str, Any] | None = {"unit": unit} if unit else None
    if factory is not None:
        return Field(default_factory=factory, description=meaning, json_schema_extra=extra, **constraints)
    return Field(default, description=meaning, json_schema_extra=extra, **constraints)


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A resolved run file: the settings, and for every dotted key what set it."""

    config: C
    provenance: Mapping[str, str]

    def explicit(self) -> list[str]:
        """The keys that a file or the command line set."""
        return [key for key, source in self.provenance.items() if source != DEFAULT]


def load(cls: type[C], path: str | Path, overrides: Sequence[str] | None = None) -> Loaded[C]:
    """Read a run file, apply `key=value` overrides, and build the settings.

    Raises ConfigError naming the file, the key, the value, what was expected and the nearest valid choice.
    """
    return load_layers(cls, read_layers(Path(path), overrides or ()))


def load_layers(cls: type[C], layers: Sequence[Layer]) -> Loaded[C]:
    """Build the settings from the layers that `hone.composition.read_layers` gave."""
    builder = _Builder({})
    config = builder.section(cls, layers, "", None)
    provenance = {key: builder.sources.get(key, DEFAULT) for key, _ in walk(config)}
    forget_reads(config)
    return Loaded(config, provenance)


def build(cls: type[C], data: Any, source: str, path: str = "") -> C:
    """Build a settings object from plain data. Raises ConfigError naming the source and the full dotted key."""
    return data if isinstance(data, cls) else _Builder({}).section(cls, [Layer(source, data)], path, None)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Merges layers and builds settings bottom-up, guided by the settings classes.

    A layer is what one file or the command line says of a section or value; a later one wins. Every error names the
    full dotted key and the layer it came from.
    """

    sources: dict[str, str]  # dotted key of each value set so far -> the layer that set it

    def section(self, cls: type[C], layers: Sequence[Layer], path: str, default: Any) -> C:
        """One section. Where the owner's default is an object of the same class, it supplies what is not set."""
        own = default if isinstance(default, cls) else None
        built = {name: own.__dict__[name] for name in own.model_fields_set} if own else {}
        for key, values in self.keys(cls, layers, path).items():
            info = cls.model_fields[key]
            inner = own.__dict__[key] if own else default_of(info)
            built[key] = self.value(info.annotation, info.metadata, values, _join(path, key), inner)
        try:
            return cls(**built)
        except ValidationError as error:
            key, sentence = _explain_error(error, path, built)
            files = [layer.source for layer in layers if layer.source != COMMAND_LINE] or [COMMAND_LINE]
            raise ConfigError(f"{self.sources.get(key, files[-1])}: {sentence}") from error

    def keys(self, cls: type[Config], layers: Sequence[Layer], path: str) -> dict[str, list[Layer]]:
        """What each key of a section is given by the layers that name it; a preset lies below all of them."""
        given: dict[str, list[Layer]] = {}
        for source, data in layers:
            if not isinstance(data, Mapping):
                raise ConfigError(f"{source}: {path or 'the file'} should be a mapping of settings, found {data!r}")
            for key, value in data.items():
                if key not in cls.model_fields:
                    raise ConfigError(f"{source}: {_unknown_key(cls, str(key), path)}")
                given.setdefault(key, []).append(Layer(source, value))
        try:
            below = cls.underlay({key: values[-1].data for key, values in given.items()})
        except ConfigError as error:
            place = f"{path}: " if path else ""
            raise ConfigError(f"{layers[-1].source}: {place}{error}") from error
        if below is not None:
            for key, value in below.data.items():
                given.setdefault(key, []).insert(0, Layer(below.source, value))
        return given

    def value(self, annotation: Any, metadata: list[Any], layers: list[Layer], path: str, default: Any = None) -> Any:
        """One field, entry of a mapping, or entry of a list."""
        if get_origin(annotation) is typing.Annotated:
            inner, *more = get_args(annotation)
            return self.value(inner, [*metadata, *more], layers, path, default)
        source, last = layers[-1]
        layers = _since(layers, lambda data: data is not None)  # `critic: null` in one layer: afresh in the next
        arms = [arm for arm in get_args(annotation) if arm is not type(None)] if _is_union(annotation) else [annotation]
        if last is None:
            if annotation not in (Any, None) and type(None) not in get_args(annotation):
                raise ConfigError(f"{source}: {path} should not be null")
            arms = []
        for arm in arms:
            origin = get_origin(arm)
            if origin is typing.Annotated:
                return self.value(arm, metadata, layers, path, default)
            if isinstance(arm, type) and issubclass(arm, Choice):
                registry = next((mark.registry for mark in metadata if isinstance(mark, FromRegistry)), None)
                if registry is not None:
                    return self.choice(registry, layers, path, default)
            if isinstance(arm, type) and issubclass(arm, Config):
                return last if isinstance(last, arm) else self.section(arm, layers, path, default)
            if (origin is dict or arm in (dict, Any)) and isinstance(last, Mapping):
                return self.mapping(get_args(arm)[1] if origin else Any, metadata, layers, path)
            if origin in (list, tuple) and isinstance(last, list | Mapping):
                return self.sequence(get_args(arm)[0], metadata, layers, path, default)
        if isinstance(last, bool) and bool not in arms and (int in arms or float in arms):
            raise ConfigError(f"{source}: {path} should be a number (found {str(last).lower()})")
        self.sources[path] = source
        return last

    def choice(self, registry: Registry, layers: list[Layer], path: str, default: Any) -> Choice:
        """One of a registry's entries. Another name is another choice: settings of the old one do not carry over."""
        name: Any = default.__dict__["name"] if isinstance(default, Choice) else None
        kept: list[Layer] = []
        for source, value in layers:
            data = {"name": value} if isinstance(value, str) else value
            if isinstance(data, Choice):
                return data
            if not isinstance(data, Mapping) or not isinstance(data.get("name", name), str):
                found = "" if value is None else f", found {value!r}"
                raise ConfigError(f"{source}: {path} should name a {registry.kind} ({', '.join(registry)}){found}")
            if data.get("name", name) != name:
                name, kept = data["name"], []
            kept.append(Layer(source, data))
        try:
            cls: type[Choice] = registry.settings(name) or Choice
        except (UnknownName, CannotLoad) as error:
            named = [layer for layer in kept if "name" in layer.data] or kept
            raise ConfigError(f"{named[-1].source}: {path}: {error}") from error
        if all("name" not in layer.data for layer in kept):
            kept.insert(0, Layer(DEFAULT, {"name": name}))
        same = isinstance(default, Choice) and default.__dict__["name"] == name
        return self.section(cls, kept, path, default if same else None)

    def mapping(self, inner: Any, metadata: list[Any], layers: list[Layer], path: str) -> dict[Any, Any]:
        """A setting whose keys are free: layers add to each other key by key."""
        layers = _since(layers, lambda data: isinstance(data, Mapping))
        given: dict[Any, list[Layer]] = {}
        for source, data in layers:
            for key, value in data.items():
                given.setdefault(key, []).append(Layer(source, value))
        built = {k: self.value(inner, metadata, values, _join(path, str(k))) for k, values in given.items()}
        self.sources[path] = _joined(layers)
        return built

    def sequence(self, inner: Any, metadata: list[Any], layers: list[Layer], path: str, default: Any) -> list[Any]:
        """A list: a later layer replaces it, or changes entries by number (`rewards.0.weight=2`)."""
        lists = [position for position, layer in enumerate(layers) if isinstance(layer.data, list)]
        whole = layers[lists[-1]] if lists else None
        old = list(default) if isinstance(default, list | tuple) and whole is None else []
        given = [[Layer(whole.source, value)] for value in whole.data] if whole else [[] for _ in old]
        later = layers[lists[-1] + 1 :] if lists else layers
        for source, data in later:
            if not isinstance(data, Mapping) or not all(str(index).isdigit() for index in data):
                raise ConfigError(f"{source}: {path} should be a list, found {data!r}")
            for index, value in data.items():
                if int(index) >= len(given):
                    text = f"there is no {path}.{index}: {path} has {len(given)} entries, numbered from 0"
                    raise ConfigError(f"{source}: {text}")
                given[int(index)].append(Layer(source, value))
        self.sources[path] = _joined([whole, *later] if whole else later)
        defaults = old or [None] * len(given)
        return [
            self.value(inner, metadata, values, f"{path}.{index}", defaults[index]) if values else defaults[index]
            for index, values in enumerate(given)
        ]


def _since(layers: list[Layer], holds: Callable[[Any], bool]) -> list[Layer]:
    """The last layers whose data all fulfil a condition: what stands before them is replaced, not merged."""
    others = [position for position, layer in enumerate(layers) if not holds(layer.data)]
    return layers[others[-1] + 1 :] if others else layers


def _joined(layers: Sequence[Layer]) -> str:
    return " and ".join(dict.fromkeys(layer.source for layer in layers))


def default_of(info: FieldInfo) -> Any:
    """The default of a field; `PydanticUndefined` if it is required."""
    return info.default_factory() if info.default_factory is not None else info.default  # type: ignore[call-arg]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unknown_key(cls: type[Config], key: str, path: str) -> str:
    known = list(cls.model_fields)
    near = _in_choices(cls, key) or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {_join(path, near[0])!r}?" if near else ""
    return f"unknown key {_join(path, key)!r}{hint} ({path or 'the top level'} has: {', '.join(known)})"


def _in_choices(cls: type[Config], key: str) -> list[str]:
    """Where in a section's choices some entry has the key: `backend.devices`, for `devices`."""
    found = []
    for name, info in cls.model_fields.items():
        for registry in [mark.registry for mark in info.metadata if isinstance(mark, FromRegistry)]:
            for entry in registry:
                with suppress(CannotLoad):  # what cannot be loaded here cannot be meant
                    settings = registry.settings(entry)
                    found += [f"{name}.{key}"] if settings is not None and key in settings.model_fields else []
    return found


def _explain_error(error: ValidationError, path: str, built: Mapping[str, Any]) -> tuple[str, str]:
    """The key that is wrong, and one sentence: what was expected there, and what was found."""
    problems = error.errors(include_url=False)
    first = problems[0]
    inside = _inside(first["loc"], built)
    key = ".".join(filter(None, [path, *map(str, inside)]))
    if first["type"] == "missing":
        if len(inside) < len(first["loc"]):  # a tuple's entry
            return key, f"{key} has too few entries (found {first['input']!r})"
        return path, f"{key} is required and was not set"
    same = [p for p in problems if _inside(p["loc"], built) == inside]  # one per arm of a union
    wanted = " or ".join(dict.fromkeys(p["msg"].removeprefix("Input ").removeprefix("Value error, ") for p in same))
    sentence = f"{key or 'the run file'}{' ' if wanted.startswith('should') else ': '}{wanted}"
    found = first["input"]
    if found is None or isinstance(found, Mapping | Config):
        return key, sentence
    choices = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
    near = difflib.get_close_matches(str(found), choices, n=1, cutoff=0.5)
    return key, f"{sentence} (found {found!r}{f'; did you mean {near[0]!r}?' if near else ''})"


def _inside(location: tuple[int | str, ...], built: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The part of a pydantic location that is a path into the data: what follows are names of union arms."""
    value: Any = built
    for depth, part in enumerate(location):
        keys = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list | tuple) else ()
        if part not in keys:
            return location[: max(depth, 1)]
        value = value[part]
    return location


# --------------------------------------------------------------------------------------------- looking at configs


def walk(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, sections left out, without counting as a read."""
    for name in type(config).model_fields:
        yield from _walk_value(f"{prefix}{name}", config.__dict__[name])


def _walk_value(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from walk(value, f"{key}.")
    elif isinstance(value, dict) and any(isinstance(inner, Config) for inner in value.values()):
        for name, inner in value.items():
            yield from _walk_value(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Config) for inner in value):
        for index, inner in enumerate(value):
            yield from _walk_value(f"{key}.{index}", inner)
    else:
        yield key, value


@dataclass(frozen=True, slots=True)
class Section:
    """A settings object within a tree, and the field of another section that it hangs on (none for the root)."""

    prefix: str  # "" for the root, else "actor.optimizer."
    config: Config
    field: FieldInfo | None


def sections(config: Config) -> Iterator[Section]:
    """Every settings object of the tree, the root first."""
    yield from _sections_in("", config, None)


def _sections_in(prefix: str, value: Any, field: FieldInfo | None) -> Iterator[Section]:
    if isinstance(value, Config):
        yield Section(prefix, value, field)
        for name, info in type(value).model_fields.items():
            yield from _sections_in(f"{prefix}{name}.", value.__dict__[name], info)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _sections_in(f"{prefix}{name}.", inner, field)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _sections_in(f"{prefix}{index}.", inner, field)


def forget_reads(config: Config) -> None:
    """Start counting reads anew: validators read fields too, and that is not using them."""
    for section in sections(config):
        section.config._reads.clear()


def count_as_read(config: Config) -> None:
    """Count every setting of a section as read: for a part that did its work in an earlier launch of this run."""
    for section in sections(config):
        section.config._reads.update(type(section.config).model_fields)


def unread(loaded: Loaded[Any]) -> list[str]:
    """Keys that were set by a file or on the command line and that nothing has read so far."""
    read: set[str] = set()
    for section in sections(loaded.config):
        chosen = {"name"} if isinstance(section.config, Choice) else set()  # the registry used it to choose the class
        read |= {f"{section.prefix}{name}" for name in section.config._reads | chosen}
    return [key for key in loaded.explicit() if key not in read]


def require_all_read(loaded: Loaded[Any]) -> None:
    """Raise ConfigError if a setting would be accepted and ignored."""
    ignored = unread(loaded)
    if ignored:
        where = ", ".join(f"{key} (set by {loaded.provenance[key]})" for key in ignored)
        raise ConfigError(f"set, but used by nothing in this run: {where}; remove it, or choose the part that uses it")


def dump(config: Config) -> str:
    """The resolved settings as YAML, in declaration order: what `config.yaml` of a run folder holds."""
    return to_yaml(plain(config))


def plain(config: Config) -> dict[str, Any]:
    """The settings as JSON-compatible data; sub-settings keep the fields of their own class."""
    return config.model_dump(mode="json", serialize_as_any=True)


__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Choice",
    "Config",
    "ConfigError",
    "FromRegistry",
    "Loaded",
    "Section",
    "SerializeAsAny",
    "build",
    "count_as_read",
    "default_of",
    "dump",
    "forget_reads",
    "load",
    "load_layers",
    "plain",
    "require_all_read",
    "sections",
    "setting",
    "unread",
    "walk",
]
