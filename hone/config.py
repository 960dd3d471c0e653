"""Run files: frozen settings, composed from YAML and the command line, with the source of each value.

    recipe.yaml  --defaults: base.yaml (one level)-->  merged mapping  --key=value overrides-->  Config tree
                                                             |
                                                        provenance: dotted key -> "default" | file | "command line"

A setting is a field of a `Config` subclass, next to the code that it configures. Its default is written only there. An
unknown key is an error that suggests the nearest valid key. A key that was set (not to its default) but not read by
the time the run starts is an error too: every part reads its settings in its constructor, and `Config` records what was
read.

This file defines, builds and inspects settings classes. `hone.composition` reads the files; `hone.config_errors` says
what is wrong with a value; `hone.explain` explains keys and writes the JSON schema.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from hone import other_frameworks
from hone.composition import COMMAND_LINE, PRESET, ConfigError, Layer, read_layers, to_yaml
from hone.config_errors import explain_error, with_preset
from hone.registry import CannotLoad, Registry, UnknownName

DEFAULT = "default"


class Config(BaseModel):
    """Base of every settings class: frozen, strict about keys, and it records which fields were read."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    _reads: set[str] = PrivateAttr(default_factory=set)
    _prefix: str = PrivateAttr("")

    def model_post_init(self, context: Any) -> None:
        """Tell sections that no run file has placed yet where they stand below this one."""
        for section in sections(self):
            section.config._prefix = section.config._prefix or section.prefix

    @field_validator("*", mode="before")
    @classmethod
    def _build_choices(cls, value: Any, info: ValidationInfo) -> Any:
        marks = cls.model_fields[str(info.field_name)].metadata
        registry = next((mark for mark in marks if isinstance(mark, FromRegistry)), None)
        return value if registry is None else registry.chosen(value)

    def key_of(self, name: str) -> str:
        """The dotted key of one of this section's settings, as a run file spells it: `actor.optimizer.lr`."""
        return f"{self._prefix}{name}"

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("_") and name in type(self).__pydantic_fields__:
            private = super().__getattribute__("__pydantic_private__")
            if private is not None:
                private["_reads"].add(name)
        return value

    def __eq__(self, other: object) -> bool:
        """Return whether class and values are the same; recorded reads do not count."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @classmethod
    def underlay(cls, given: Mapping[str, Any]) -> Layer | None:
        """Defaults that depend on what was `given` for this section: `preset: NAME` sets the keys that nobody else set.

        Raises ConfigError for an unknown preset; the caller adds the source to the message.
        """
        return None


class Choice(Config):
    """A registry entry and its settings: `loss: {name: ppo, clip_low: 0.2}`, or just `loss: ppo`."""

    name: str = Field(description="the chosen entry")


@dataclass(frozen=True, slots=True)
class FromRegistry:
    """Mark a field as a choice among the entries of a registry: `Annotated[Choice, FromRegistry(LOSSES)]`.

    The field gets the settings class of the chosen entry, also if settings are built in Python from plain data:
    `EngineConfig(schedule={"name": "cosine"}).schedule` is a `CosineConfig`.
    """

    registry: Registry

    def chosen(self, value: Any) -> Any:
        """Build data that names an entry with the entry's class; pydantic alone knows only the class of the field."""
        if isinstance(value, list | tuple):
            return tuple(self.chosen(one) for one in value)
        data = {"name": value} if isinstance(value, str) else value
        if isinstance(data, Choice) and type(data) is not Choice:  # a plain `Choice` is an entry with its defaults
            wanted = self.registry.settings(data.__dict__["name"])
            if wanted is not None and not isinstance(data, wanted):
                data = {name: data.__dict__[name] for name in data.model_fields_set | {"name"}}
        if not isinstance(data, Mapping) or "name" not in data:
            return data
        return _Builder({}, Config).choice(self.registry, [Layer("settings", data)], self.registry.kind, None)


def setting(default: Any = ..., meaning: str = "", *, unit: str = "", factory: Any = None, **constraints: Any) -> Any:
    """Define a field; `hone config --explain` shows its meaning and unit. Constraints are pydantic's (ge, le ...)."""
    extra: dict[str, Any] | None = {"unit": unit} if unit else None
    if factory is not None:
        return Field(default_factory=factory, description=meaning, json_schema_extra=extra, **constraints)
    return Field(default, description=meaning, json_schema_extra=extra, **constraints)


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A resolved run file: the settings, and the source of each dotted key."""

    config: C
    provenance: Mapping[str, str]

    def explicit(self) -> list[str]:
        """The keys that a file or the command line set; what a preset filled is not among them."""
        return [key for key, source in self.provenance.items() if source.split(" ")[0] not in (DEFAULT, PRESET)]


def load(cls: type[C], path: str | Path, overrides: Sequence[str] | None = None) -> Loaded[C]:
    """Read a run file, apply `key=value` overrides, and build the settings.

    Raises ConfigError with the file, the key, the value, what was expected and the nearest valid choice.
    """
    return load_layers(cls, read_layers(Path(path), overrides or ()))


def load_layers(cls: type[C], layers: Sequence[Layer]) -> Loaded[C]:
    """Build the settings from the layers of `hone.composition.read_layers`."""
    builder = _Builder({}, cls)
    config = builder.section(cls, layers, "", None)
    provenance = {key: builder.sources.get(key, DEFAULT) for key, _ in walk(config)}
    for section in sections(config):
        section.config._prefix = section.prefix
    forget_reads(config)
    return Loaded(config, provenance)


def build(cls: type[C], data: Any, source: str, path: str = "") -> C:
    """Build a settings object from plain data. Raises ConfigError with the source and the full dotted key."""
    return data if isinstance(data, cls) else _Builder({}, cls).section(cls, [Layer(source, data)], path, None)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Merge layers and build settings bottom-up, following the settings classes.

    A layer is the part of one file, or of the command line, that concerns a section or value; later layers win. Every
    error names the full dotted key and the layer.
    """

    sources: dict[str, str]  # dotted key -> the layer that set it
    root: type[Config]

    def section(self, cls: type[C], layers: Sequence[Layer], path: str, default: Any) -> C:
        """Build one section. Keys that are not set come from the owner's `default`, if it has the same class."""
        own = default if isinstance(default, cls) else None
        built = {name: own.__dict__[name] for name in own.model_fields_set} if own else {}
        for key, values in self.keys(cls, layers, path).items():
            info = cls.model_fields[key]
            if len(values) > 1 and values[-1].data is None and _has_only_a_default(info):
                continue  # takes back what lower layers set
            inner = own.__dict__[key] if own else default_of(info)
            built[key] = self.value(info.annotation, info.metadata, values, _join(path, key), inner)
        try:
            return cls(**built)
        except ValidationError as error:
            key, sentence = explain_error(error, cls, path, built)
            files = [layer.source for layer in layers if layer.source != COMMAND_LINE] or [COMMAND_LINE]
            found = f"{self.sources.get(key, files[-1])}: {sentence}"
            raise ConfigError(with_preset(found, self.sources)) from error

    def keys(self, cls: type[Config], layers: Sequence[Layer], path: str) -> dict[str, list[Layer]]:
        """The layers that set each key of a section, lowest first; a preset is the lowest."""
        given: dict[str, list[Layer]] = {}
        for source, data in layers:
            if not isinstance(data, Mapping):
                hint = f"; write {path}.path={data}" if isinstance(data, str) and "path" in cls.model_fields else ""
                raise ConfigError(
                    f"{source}: {path or 'the file'} should be a mapping (key: value), found {data!r}{hint}"
                )
            for key, value in data.items():
                if key not in cls.model_fields:
                    sentence = f"{source}: {self.unknown_key(cls, str(key), path, value)}"
                    raise ConfigError(with_preset(sentence, {path: layers[0].source}))
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

    def unknown_key(self, cls: type[Config], key: str, path: str, value: Any) -> str:
        """A sentence with the keys that may have been meant: a near one here, another framework's, or one elsewhere."""
        known, own, leaf = list(cls.model_fields), _join(path, key), key.rpartition(".")[2]
        while isinstance(value, Mapping) and len(value) == 1:  # from a dotted key on the command line
            leaf, value = next(iter(value.items()))
        spelled = [_join(path, one) for one in difflib.get_close_matches(key, known, n=1, cutoff=0.75)]
        spelled = spelled or [_join(path, one) for one in known if key in one.split("_")]
        near = [_join(path, one) for one in _in_choices(cls, key)] or spelled or self.elsewhere(own, str(leaf))
        near = near or [_join(path, one) for one in difflib.get_close_matches(key, known, n=1, cutoff=0.5)]
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        if "." in key and own in key_paths(self.root):
            inner = key.replace(".", ": {")
            hint = f"; write it in its section: {inner}: ...{'}' * key.count('.')}"
        if "." not in path and leaf in other_frameworks.INSTEAD:  # deeper, it is a key of a part with its own meaning
            hint = f"; {other_frameworks.INSTEAD[leaf]}"
        return f"unknown key {own!r}{hint} ({path or 'the top level'} has: {', '.join(known)})"

    def elsewhere(self, key: str, leaf: str) -> list[str]:
        """Keys of the whole run file with the last part of an unknown key, or with what other frameworks call it."""
        every = set(key_paths(self.root))
        if key in every:  # a setting of another entry of a registry
            return []
        meant = other_frameworks.keys_meant(key) or other_frameworks.keys_meant(leaf)
        theirs, section = [one for one in meant if one in every], key.partition(".")[0] + "."
        having = [one for one in every if one.rpartition(".")[2] == leaf]
        same = sorted((not one.startswith(section), one.count("."), one) for one in having)
        return theirs or [one for *rank, one in same if rank == list(same[0][:2])][:3]

    def value(self, annotation: Any, metadata: list[Any], layers: list[Layer], path: str, default: Any = None) -> Any:
        """Build one field, one entry of a mapping, or one entry of a list."""
        if get_origin(annotation) is typing.Annotated:
            inner, *more = get_args(annotation)
            return self.value(inner, [*metadata, *more], layers, path, default)
        source, last = layers[-1]
        layers = _since(layers, lambda data: data is not None)  # `critic: null` in one layer: later layers start anew
        arms = [arm for arm in get_args(annotation) if arm is not type(None)] if _is_union(annotation) else [annotation]
        if last is None and (annotation is dict or get_origin(annotation) is dict):  # `columns=null` empties a mapping
            self.sources[path] = source
            return {}
        if last is None:
            if not _takes_none(annotation):
                raise ConfigError(f"{source}: {path} is null, but needs a value; remove the key to get its default")
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
        of_choices = get_origin(annotation) in (list, tuple) and any(
            isinstance(mark, FromRegistry) for mark in metadata
        )
        if of_choices and isinstance(last, str):
            raise ConfigError(f"{source}: {path} should be a list (found {last!r}); write [{last}]")
        if isinstance(last, bool) and bool not in arms and (int in arms or float in arms):
            raise ConfigError(f"{source}: {path} should be a number (found {str(last).lower()})")
        self.sources[path] = source
        return last

    def choice(self, registry: Registry, layers: list[Layer], path: str, default: Any) -> Choice:
        """Build the chosen registry entry. A layer with another name drops the settings of the entry before."""
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
            theirs = other_frameworks.VALUES.get((path.rpartition(".")[2], name))
            meant = f"{name!r} is no {registry.kind} here: {theirs}" if theirs else error
            raise ConfigError(f"{named[-1].source}: {path}: {meant}") from error
        if all("name" not in layer.data for layer in kept):
            kept.insert(0, Layer(DEFAULT, {"name": name}))
        for source, data in kept:
            for key in data.keys() - cls.model_fields.keys():
                if others := [entry for entry in registry if key in _keys_of(registry, entry)]:
                    having = f"a setting of {path}={' or '.join(others)}, and {path} is {name}"
                    sentence = f"{source}: {_join(path, key)} is {having}: set {path}={others[0]} too"
                    raise ConfigError(with_preset(sentence, {path: kept[0].source}))
        same = isinstance(default, Choice) and default.__dict__["name"] == name
        return self.section(cls, kept, path, default if same else None)

    def mapping(self, inner: Any, metadata: list[Any], layers: list[Layer], path: str) -> dict[Any, Any]:
        """Build a mapping with free keys; layers are merged key by key. {} clears, and null removes an entry."""
        layers = _since(layers, lambda data: isinstance(data, Mapping) and bool(data)) or layers[-1:]
        given: dict[Any, list[Layer]] = {}
        for source, data in layers:
            for key, value in data.items():
                given.setdefault(key, []).append(Layer(source, value))
        there = [str(key) for key, values in given.items() if values[-1].data is not None]
        for key, values in given.items() if there and not _takes_none(inner) else ():
            if values[-1].data is None and len(values) == 1:
                text = f"there is no {path}.{key} to remove; {path} has: {', '.join(there)}"
                raise ConfigError(f"{values[0].source}: {text}")
        kept = {k: v for k, v in given.items() if v[-1].data is not None or len(v) == 1 or _takes_none(inner)}
        built = {k: self.value(inner, metadata, values, _join(path, str(k))) for k, values in kept.items()}
        self.sources[path] = _joined(layers)
        return built

    def sequence(self, inner: Any, metadata: list[Any], layers: list[Layer], path: str, default: Any) -> list[Any]:
        """Build a list. A later layer replaces it, or changes entries by number (`rewards.0.weight=2`)."""
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
    """The layers after the last one that does not fulfil `holds`: earlier layers are replaced, not merged."""
    others = [position for position, layer in enumerate(layers) if not holds(layer.data)]
    return layers[others[-1] + 1 :] if others else layers


def _takes_none(annotation: Any) -> bool:
    return annotation in (Any, None) or type(None) in get_args(annotation)


def _has_only_a_default(info: FieldInfo) -> bool:
    """Return whether null says nothing to this field but that it is not set."""
    is_mapping = info.annotation is dict or get_origin(info.annotation) is dict
    return not (info.is_required() or is_mapping or _takes_none(info.annotation))


def _joined(layers: Sequence[Layer]) -> str:
    return " and ".join(dict.fromkeys(layer.source for layer in layers))


def default_of(info: FieldInfo) -> Any:
    """The default of a field; `PydanticUndefined` if it is required."""
    return info.default_factory() if info.default_factory is not None else info.default  # type: ignore[call-arg]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def key_paths(cls: type[Config], prefix: str = "", depth: int = 6) -> Iterator[str]:
    """Every dotted key that a run file may have, without entries of mappings and lists."""
    for name, info in cls.model_fields.items():
        yield f"{prefix}{name}"
        for section in _sections_of(info) if depth else ():
            yield from key_paths(section, f"{prefix}{name}.", depth - 1)


def _sections_of(info: FieldInfo) -> list[type[Config]]:
    """The classes of which a field may be: sections, and the settings of its registry's entries."""
    arms = [info.annotation] if not _is_union(info.annotation) else get_args(info.annotation)
    found = [arm for arm in arms if isinstance(arm, type) and issubclass(arm, Config)]
    for registry in [mark.registry for mark in info.metadata if isinstance(mark, FromRegistry)]:
        for entry in registry:
            with suppress(CannotLoad):  # an entry that cannot be imported here
                found += filter(None, [registry.settings(entry)])
    return found


def _keys_of(registry: Registry, entry: str) -> Collection[str]:
    """The keys of an entry's settings; none for one that cannot be imported here."""
    try:
        settings = registry.settings(entry)
    except CannotLoad:
        return ()
    return () if settings is None else settings.model_fields


def _in_choices(cls: type[Config], key: str) -> list[str]:
    """Find the key in entries of this section's registries: `backend.devices` for `devices`, or an example."""
    found = []
    for name, info in cls.model_fields.items():
        in_list = get_origin(info.annotation) in (list, tuple)
        for registry in [mark.registry for mark in info.metadata if isinstance(mark, FromRegistry)]:
            having = [entry for entry in registry if key in _keys_of(registry, entry)]
            found += [f"{name}=[{{name: {entry}, {key}: ...}}]" if in_list else f"{name}.{key}" for entry in having]
    return list(dict.fromkeys(found))


# --------------------------------------------------------------------------------------------- looking at configs


def walk(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, without sections. Does not count as a read."""
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
    """A settings object in a tree, and the field of its parent section that holds it (None for the root)."""

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
    entries: Any = value.items() if isinstance(value, dict) else ()
    for part, inner in enumerate(value) if isinstance(value, list | tuple) else entries:
        yield from _sections_in(f"{prefix}{part}.", inner, field)


def forget_reads(config: Config) -> None:
    """Clear the recorded reads: validators read fields too, and that does not count as using them."""
    for section in sections(config):
        section.config._reads.clear()


def count_as_read(config: Config) -> None:
    """Record every setting of a section as read, for a part that finished in an earlier launch of this run."""
    for section in sections(config):
        section.config._reads.update(type(section.config).model_fields)


def unread(loaded: Loaded[Any]) -> list[str]:
    """Keys that a file or the command line set to another value than their default, and that no part has read so far.

    A default that is written out changes nothing: the `config.yaml` of a run has all of them, and can be run again.
    """
    read: set[str] = set()
    for section in sections(loaded.config):
        chosen = {"name"} if isinstance(section.config, Choice) else set()  # the registry chose the class by it
        fields = type(section.config).model_fields
        same = {name for name, info in fields.items() if section.config.__dict__[name] == default_of(info)}
        read |= {f"{section.prefix}{name}" for name in section.config._reads | chosen | same}
    return [key for key in loaded.explicit() if key not in read]


def require_all_read(loaded: Loaded[Any], later: Collection[str] = ()) -> None:
    """Raise ConfigError if a key that was set is not used by any part of the run.

    `later` names sections, at any depth, whose keys are read later.
    """
    ignored = [key for key in unread(loaded) if set(later).isdisjoint(key.split("."))]
    if ignored:
        where = ", ".join(f"{key} (set by {loaded.provenance[key]})" for key in ignored)
        raise ConfigError(f"no part of this run uses these keys: {where}; remove them, or choose the part that does")


def dump(config: Config) -> str:
    """The resolved settings as YAML, in declaration order; a run writes them to `config.yaml`."""
    return to_yaml(plain(config))


def plain(config: Config) -> dict[str, Any]:
    """The settings as JSON-compatible data; nested settings keep the fields of their own class."""
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
    "with_preset",
]
