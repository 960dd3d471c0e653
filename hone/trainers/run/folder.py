"""The run folder: one run at a time writes into it; config.yaml holds the settings of the run.

<run.dir>/config.yaml  metrics.jsonl  rollouts.jsonl.gz  tensorboard/  checkpoints/  model/  export/  report.html
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from hone.config import Config, ConfigError, dump, plain
from hone.runtime import ranks
from hone.tracking.base import FINISHED
from hone.tracking.facts import RUN_FILE

LOCK = ".lock"
RUN_DIR = "run.dir"  # the key of the run folder, whose name says nothing of the run in it
IDENTITY = ("kind", "model", "warm_start")
"""Sections that must not change in a run folder: with another model it is another run."""
_ELSEWHERE = "give another run.dir, or set this one aside and begin again (on the command line: --restart)"


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Lock the run folder. The kernel releases the lock however the process ends. Of several ranks, the first holds it.

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


def is_claimed(folder: Path) -> bool:
    """Return whether a process is writing the run."""
    try:
        with (folder / LOCK).open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def write_config(folder: Path, config: Config, steps: int | None = None) -> list[str]:
    """Write `config.yaml`, and keep the one before it as `config-0001.yaml` and so on.

    Returns what differs from it, as `key: before -> now`. Raises ConfigError if the folder holds another run: one of
    another kind, model or warm start, or one that has finished `steps` with other settings.
    """
    path = folder / "config.yaml"
    changes = _changes(path, config)
    shown = [f"{key}: {_short(before)} -> {_short(now)}" for key, (before, now) in changes.items()]
    if any(key.split(".")[0] in IDENTITY for key in changes):
        other = [one for key, one in zip(changes, shown, strict=True) if key.split(".")[0] in IDENTITY]
        raise ConfigError(f"run.dir: {folder} holds another run ({', '.join(other[:3])}); {_ELSEWHERE}")
    if changes and steps is not None and finished_steps(folder) >= steps:
        raise ConfigError(f"run.dir: {folder} is finished with other settings ({', '.join(shown[:3])}); {_ELSEWHERE}")
    if changes:  # a copy, because a kill after a rename would leave a folder that is no run's
        kept = next(one for number in count(1) if not (one := folder / f"config-{number:04d}.yaml").exists())
        _write(kept, path.read_text(encoding="utf-8"))
    _write(path, dump(config))
    return shown


def _write(path: Path, text: str) -> None:
    """Write a file that is whole or absent."""
    temporary = path.with_name("config.yaml.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def set_aside(folder: Path) -> Path | None:
    """Rename a run folder, so that its run can begin again; returns its new name, None if there is no such folder."""
    if not folder.exists():
        return None
    with claim(folder):
        other = next(one for number in count(1) if not (one := folder.with_name(f"{folder.name}-{number}")).exists())
        return folder.rename(other)


def _changes(path: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ from those in the file: key -> (before, now)."""
    if not path.is_file():
        return {}
    before = _flat(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    now = _flat(plain(config))
    places = (str(before.get(RUN_DIR)), str(now.get(RUN_DIR)))
    launched = _launched_in(path.parent, places[0])
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if key != RUN_DIR and not _same(before.get(key), now.get(key), places, launched)
    }


def _launched_in(folder: Path, place: str) -> str:
    """The working folder of a launch that called `folder` by the name `place`; empty if the name does not tell.

    >>> _launched_in(Path("/data/runs/a"), "runs/a")
    '/data'
    """
    whole = str(folder.resolve())
    inside = f"{os.sep}{os.path.normpath(place)}"
    return whole.removesuffix(inside) or os.sep if not os.path.isabs(place) and whole.endswith(inside) else ""


def _same(before: Any, now: Any, places: tuple[str, str], launched: str) -> bool:
    """Return whether two values of a key are equal, or names of one file or folder.

    That is so where both names lead to the same place, the earlier one from the working folder `launched`, or where the
    file has moved together with the run folder (`places`: where that was and is) and is no longer at its old place.
    `file.py:function` names a file, too.
    """
    if before == now or not isinstance(before, str) or not isinstance(now, str):
        return bool(before == now)
    (old, _, old_name), (new, _, new_name) = (
        one.rpartition(":") if ".py:" in one else (one, "", "") for one in (before, now)
    )
    if old_name != new_name or not new:
        return False
    was, found = os.path.expanduser(old), os.path.expanduser(new)  # of os.path: text that can be no path is no error
    was = os.path.join(launched, was)
    if not os.path.exists(found):
        return False
    if os.path.exists(was):
        return os.path.samefile(was, found)
    whole = all(os.path.isabs(one) for one in (was, found, *places))
    return whole and bool(os.path.relpath(was, places[0]) == os.path.relpath(found, places[1]))


def finished_steps(folder: Path) -> int:
    """Return how many steps a finished run took; -1 if it has not finished, or that is not known."""
    try:
        facts = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1
    total = facts.get("total_steps")
    return total if facts.get("outcome") == FINISHED and isinstance(total, int) else -1


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
