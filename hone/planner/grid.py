"""The settings of a simulation: every combination of the values that a user wants to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from hone.config import ConfigError
from hone.planner.lengths import parse_lengths
from hone.planner.simulation import Setting
from hone.registry import unknown

SHARED = "shared"  # trainer and servers take turns on all devices
NAMES = ("devices", "split", "lengths", "prompts_per_device", "prompt_tokens", "steps", "staleness")
WHOLE = ("prompt_tokens", "steps", "staleness")  # whole numbers, which are fields of a setting


@dataclass(frozen=True, slots=True)
class Base:
    """Settings and costs that all cells of a grid share."""

    setting: Setting
    has_lengths: bool  # the setting's lengths come from a recorded run
    longest: int  # tokens of an answer
    server_devices: int  # of each server
    server_shape: str  # the same in the words of a run file, for errors


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    names: Mapping[str, str]  # the dimensions that vary, as the user wrote them
    setting: Setting

    def plain(self) -> dict[str, Any]:
        """The setting as JSON-compatible data."""
        found = asdict(replace(self.setting, lengths=None))  # type: ignore[arg-type]
        return {**dict(self.names), **found, "lengths": self.setting.lengths.text}


def cells(base: Base, grid: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Every combination of the grid's values, the last name varying fastest.

    Shared devices have no staleness above 0: these combinations are left out. Raises ConfigError for values that make
    no run.
    """
    for name in grid:
        if name not in NAMES:
            raise ConfigError(unknown("--grid", name, list(NAMES)))
    if "lengths" not in grid and not base.has_lengths:
        raise ConfigError(
            "nothing says how long answers are: add --grid lengths=lognormal:MEAN:SIGMA (or constant:N, "
            "uniform:LOW:HIGH, the path of a rollouts.jsonl.gz), or name a run that recorded rollouts with --from"
        )
    if "devices" not in grid and (alone := [one for one in ("split", "prompts_per_device") if one in grid]):
        raise ConfigError(f"--grid {alone[0]} needs the devices that it refers to; add --grid devices=16,128")
    names = [name for name in NAMES if name in grid]
    found = [_cell(base, dict(zip(names, values, strict=True))) for values in product(*(grid[one] for one in names))]
    kept = [one for one in found if one is not None]
    if not kept:
        raise ConfigError("--grid: no combination is left; split=shared exists with staleness 0 only")
    return kept


def _cell(base: Base, names: dict[str, str]) -> Cell | None:
    setting = base.setting
    if "lengths" in names:
        setting = replace(setting, lengths=parse_lengths(names["lengths"], base.longest))
    whole: dict[str, Any] = {name: _whole(name, names[name]) for name in WHOLE if name in names}
    setting = replace(setting, **whole)
    if "devices" in names:
        devices, split = _whole("devices", names["devices"]), names.get("split", "0.5")
        if split == SHARED and setting.staleness:
            return None
        trainer, left = (devices, devices) if split == SHARED else _divided(devices, split)
        replicas = left // base.server_devices
        if not trainer or not replicas:
            raise ConfigError(
                f"--grid devices={devices} split={split}: {trainer} devices for the trainer and {left} for servers of "
                f"{base.server_devices} ({base.server_shape}); each side needs one at least"
            )
        setting = replace(setting, trainer_devices=float(trainer), replicas=replicas)
        if "prompts_per_device" in names:
            prompts = round(_number("prompts_per_device", names["prompts_per_device"]) * devices)
            setting = replace(setting, prompts_per_step=max(prompts, 1))
    return Cell(names, setting)


def _divided(devices: int, split: str) -> tuple[int, int]:
    """The devices of the trainer and of the servers."""
    share = _number("split", split)
    if not share < 1:
        raise ConfigError(f"--grid split={split}: expected the trainer's share between 0 and 1, or {SHARED}")
    trainer = round(devices * share)
    return trainer, devices - trainer


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--grid {name}={text}: expected a number above 0")
    return number


def _whole(name: str, text: str) -> int:
    least = 1 if name in ("devices", "steps") else 0
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"--grid {name}={text}: expected a whole number, {least} or more")
    return int(text)


__all__ = ["NAMES", "Base", "Cell", "cells"]
