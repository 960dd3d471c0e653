"""The run folder: one run at a time writes into it, and it says what the run was told.

<run.dir>/config.yaml  metrics.jsonl  rollouts.jsonl  tensorboard/  checkpoints/  model/  export/  report.html
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from hone.config import Config, ConfigError, dump, plain
from hone.runtime import ranks

LOCK = ".lock"
IDENTITY = ("kind", "model", "warm_start")
"""Sections that make a run the run it is: another model in the same folder is another run."""


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the run folder; the kernel lets go of it however the process ends. Of several ranks, the first holds it.

    Raises ConfigError if another process is writing this run.
    """
    if not ranks.is_first():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(
                f"run.dir: process {lock.read().strip() or '?'} is writing the run in {folder}"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def write_config(folder: Path, config: Config) -> list[str]:
    """Write `config.yaml`, and say which keys differ from those the run in this folder was started with.

    Raises ConfigError if they differ in what makes it this run (the model, the warm start, the kind of training).
    """
    path = folder / "config.yaml"
    changes: list[str] = []
    if path.is_file():
        before = _flat(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
        now = _flat(plain(config))
        changes = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        identity = [key for key in changes if key.split(".")[0] in IDENTITY]
        if identity:
            shown = ", ".join(f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in identity[:3])
            raise ConfigError(f"run.dir: {folder} holds another run ({shown}); choose another folder for this one")
    temporary = path.with_suffix(".yaml.partial")
    temporary.write_text(dump(config), encoding="utf-8")
    temporary.replace(path)
    return changes


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
