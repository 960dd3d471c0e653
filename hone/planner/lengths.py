"""Lengths of the answers of a simulated run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hone.config import ConfigError
from hone.tracking.base import TrackingError
from hone.tracking.trackers.jsonl import ROLLOUTS_FILE, parse_line, rollout_lines

SCALINGS = 20  # steps towards the mean; each removes at least the share of answers that are not cut


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of answer lengths, in tokens."""

    text: str  # as the user wrote it
    draw: Callable[[Random], int]


def parse_lengths(text: str, longest: int) -> Lengths:
    """Read `constant:N`, `uniform:LOW:HIGH`, `lognormal:MEAN:SIGMA`, or the path of a recorded `rollouts.jsonl.gz`.

    Answers end at `longest` tokens. `MEAN` is the mean before that cut, `SIGMA` the deviation of the logarithm. Raises
    ConfigError for any other text.
    """
    kind, _, rest = text.partition(":")
    if kind not in _PARAMETERS:
        return recorded(Path(text), longest)
    numbers = _numbers(text, rest, _PARAMETERS[kind])
    if kind == "constant":
        found = _constant(numbers[0])
    elif kind == "uniform":
        found = _uniform(text, *numbers)
    else:
        found = _lognormal(*numbers)
    return Lengths(text, lambda random: min(max(found(random), 1), longest))


_PARAMETERS = {"constant": ("N",), "uniform": ("LOW", "HIGH"), "lognormal": ("MEAN", "SIGMA")}


def recorded(path: Path, longest: int, mean: float | None = None) -> Lengths:
    """The lengths of the training answers in a `rollouts.jsonl.gz`, or in the one of a run folder, drawn at random.

    A run records a sample of its answers. With `mean`, the mean length of all of them, the lengths are scaled to it.
    """
    file = path / ROLLOUTS_FILE if path.is_dir() else path
    if not file.is_file():
        kinds = ", ".join(":".join((kind, *names)) for kind, names in _PARAMETERS.items())
        raise ConfigError(f"--lengths {path}: expected {kinds}, or the path of a rollouts.jsonl.gz; found no such file")
    try:
        lengths = recorded_lengths(file)
    except TrackingError as error:
        raise ConfigError(
            f"{error}; expected the rollouts.jsonl.gz of a run: name another run, or give --lengths constant:N"
        ) from error
    if not lengths:
        raise ConfigError(f"{file} has no answers of training steps; record some with tracking.rollouts_per_step")
    scale = 1.0 if mean is None else _scale(lengths, longest, mean)
    return Lengths(str(path), lambda random: _cut(random.choice(lengths) * scale, longest))


def _cut(length: float, longest: int) -> int:
    return min(max(round(length), 1), longest)


def _scale(lengths: Sequence[int], longest: int, mean: float) -> float:
    """The factor that gives cut lengths this mean, as nearly as whole tokens allow."""
    scale = 1.0
    for _ in range(SCALINGS):  # lengths that are cut do not grow, so the others have to grow more
        scale *= mean * len(lengths) / sum(_cut(one * scale, longest) for one in lengths)
    return scale


def recorded_lengths(file: Path) -> list[int]:
    """The length of each training answer in a `rollouts.jsonl.gz`. Raises TrackingError for a damaged line."""
    records = (parse_line(file, number, line) for number, line in enumerate(rollout_lines(file), start=1))
    found: list[Any] = [record.get("response_length") for record in records if not record.get("set")]
    if wrong := [one for one in found if not isinstance(one, int)]:
        raise TrackingError(f"{file}: response_length should be a number of tokens, found {wrong[0]!r:.60}")
    return found


def _numbers(text: str, rest: str, names: Sequence[str]) -> list[float]:
    parts = rest.split(":") if rest else []
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != len(names) or any(not math.isfinite(number) or number <= 0 for number in numbers):
        kind = text.partition(":")[0]
        raise ConfigError(f"--lengths {text}: expected {':'.join((kind, *names))} with numbers above 0")
    return numbers


def _constant(length: float) -> Callable[[Random], int]:
    return lambda _: round(length)


def _uniform(text: str, low: float, high: float) -> Callable[[Random], int]:
    if low > high:
        raise ConfigError(f"--lengths {text}: LOW is above HIGH")
    return lambda random: random.randint(round(low), round(high))


def _lognormal(mean: float, sigma: float) -> Callable[[Random], int]:
    mu = math.log(mean) - sigma**2 / 2
    return lambda random: round(random.lognormvariate(mu, sigma))


__all__ = ["Lengths", "parse_lengths", "recorded", "recorded_lengths"]
