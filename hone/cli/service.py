"""The training service behind `hone serve RUN.yaml`, and the keys of its tenants: `hone serve key add NAME`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import typer

from hone.config import ConfigError, Loaded, load, require_all_read
from hone.registry import resolve, unknown
from hone.service.disk.keys import add_key, remove_key
from hone.service.disk.registry import REGISTRY_FILE, Key, Registry
from hone.service.settings import ServeConfig

KEY = "key"
VERBS = ("add", "remove", "list")


def serve_run_file(path: Path, overrides: Sequence[str]) -> None:
    """Serve the base model of a run file of `kind: serve` for training, until Ctrl-C."""
    loaded = _loaded(path, overrides)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    listen = loaded.config.listen
    try:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        listener = socket.create_server((listen.host, listen.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"listen.host={listen.host} listen.port={listen.port}: {error.strerror or error}; set listen.port to "
            "another port, or to 0 for any that is free, and listen.host to an address of this machine"
        ) from error
    resolve("hone.service.server:serve")(
        loaded.config, listener, typer.echo, lambda: require_all_read(loaded, ("limits", "training"))
    )


def manage_keys(arguments: Sequence[str], models: int | None, tokens_per_minute: int | None, size: int | None) -> None:
    """`add NAME`, `remove NAME` or `list`, then a run file or folder=...: whose service the keys are for."""
    verb, *rest = arguments or [""]
    if verb not in VERBS:
        raise ConfigError(unknown("verb of hone serve key", verb, list(VERBS)))
    names = [] if verb == "list" else rest[:1]
    if verb != "list" and not names:
        raise ConfigError(f"name the tenant: hone serve key {verb} NAME")
    place = _folder(rest[len(names) :]) / REGISTRY_FILE
    if verb != "add" and not place.is_file():
        raise ConfigError(f"no service has kept keys in {place.parent}; name its run file or folder=... at the end")
    registry = Registry(place)
    try:
        if verb == "add":
            typer.echo(add_key(registry, names[0], models, tokens_per_minute, size))
        elif verb == "remove":
            remove_key(registry, names[0])
        else:
            for one in registry.find(Key, "1 ORDER BY name"):
                limits = f"models {one.models}, tokens per minute {one.tokens_per_minute}, bytes {one.bytes}"
                typer.echo(f"{one.name}: {limits}")
    finally:
        registry.close()


def _folder(rest: Sequence[str]) -> Path:
    files = [one for one in rest if "=" not in one]
    if files:
        return _loaded(Path(files[0]), [one for one in rest if "=" in one]).config.root
    folder = next((one.removeprefix("folder=") for one in rest if one.startswith("folder=")), None)
    return Path(folder or str(ServeConfig.model_fields["folder"].default)).expanduser().absolute()


def _loaded(path: Path, overrides: Sequence[str]) -> Loaded[ServeConfig]:
    return load(ServeConfig, path, overrides)
