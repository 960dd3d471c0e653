"""The prediction of a run that is launched: made from a copy of its settings, held against the run by the report.

launch --> sizes from files --> forecast --> prediction.json    what cannot fit is refused before anything is loaded
steps 1, 2, 4, 8 ... -----> memory of the ranks --> peaks.json
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hone.config import ConfigError
from hone.models.settings import ModelConfig
from hone.planner.devices import CPU, GIB, Machine, known_devices, this_machine
from hone.platforms.base import current_platform
from hone.platforms.host_memory import forget_peak
from hone.registry import resolve
from hone.runtime import ranks
from hone.tracking.report.prediction import PEAKS_FILE, PREDICTION_FILE
from hone.trainers.forecast.changes import changed, ways_to_fit
from hone.trainers.forecast.forecast import Forecast, Given, forecast, swap_bytes, why_it_cannot_fit
from hone.trainers.forecast.setup import placement_of
from hone.trainers.forecast.sizes import POLICY, Sizes, sizes_of
from hone.trainers.policy.checks import narrow_room
from hone.trainers.policy.settings import PolicyRunConfig
from hone.workers.train import TrainHandle

LOG = logging.getLogger("hone")
LAUNCH_ANYWAY = "HONE_LAUNCH_OVER_MEMORY"  # environment variable: 1 launches what cannot fit


def foretell(config: Any, model: ModelConfig, folder: Path) -> str:
    """Write the prediction of a run into its folder, before anything is loaded; returns the line that says so.

    `model` is the run's model in its folder. Raises ConfigError for a run whose weights, gradients and optimizer state
    alone are more than the device has; every other run starts, without a prediction where none can be made.
    """
    apart = config.runtime.backend.name != "local"
    refuse = not apart and os.environ.get(LAUNCH_ANYWAY, "") != "1"
    try:
        with torch.random.fork_rng(devices=[]), TemporaryDirectory(prefix="hone-prediction-") as made:
            # a copy, because what the planner reads is not read by the run
            copy = changed(config.model_copy(update={"model": model}), {})
            on_cpu = current_platform().device == CPU
            if on_cpu and copy.actor.lora is not None and copy.actor.backend.computes_here:
                resolve("hone.engines.lora.adapter:Adapter")  # PEFT's modules are held, too
            base = _held() if on_cpu else 0  # measuring a CPU takes memory itself
            launched = ranks.ranks()
            machine = this_machine(known_devices(), copy.actor.compute_dtype)
            given = Given(base=base, ranks=launched if launched > 1 else 0)
            sizes = sizes_of(copy, Path(made), convert=False)
            found = forecast(copy, sizes, placement_of(copy, machine, given.ranks), given)
            why_not = why_refused(copy, sizes, machine, given, found) if refuse else ""
    except Exception as error:  # noqa: BLE001  of any model, data set or device: no run ends for its prediction
        why = " ".join(str(error).split()) or type(error).__name__
        _write(folder / PREDICTION_FILE, {"why_not": why})
        return f"no prediction of memory and time for this run: {why}"
    if on_cpu:
        _held()
        forget_peak()  # of what the process did before, and of measuring the CPU
    if why_not:
        raise ConfigError(f"{why_not}. To launch it all the same, set {LAUNCH_ANYWAY}=1 in the environment")
    _write(folder / PREDICTION_FILE, {**found.plain(), "on_cpu": on_cpu, "ranks_apart": apart})
    policy, narrow = sizes.models[POLICY], ""
    if isinstance(config, PolicyRunConfig):
        narrow = narrow_room(config, policy.context, sizes.lengths.prompt_max)
    unread = policy.files.unread()
    return (
        (
            f"predicted: {found.peak_bytes / GIB:.2f} GiB at most, in {found.peak.name}, {found.step_s:.3g} s a step "
            f"({found.rates.source}); the report compares"
        )
        + (f"; not read of the model's files: {unread}" if unread else "")
        + (f"\nwarning: {narrow}" if narrow else "")
    )


def _held() -> int:
    """Bytes that this process holds, after what it has freed is given back."""
    current_platform().empty_cache()
    return current_platform().memory().allocated


def why_refused(config: Any, sizes: Sizes, machine: Machine, given: Given, found: Forecast) -> str:
    """Empty if a run in this process may fit on its device, else the arithmetic and the change that makes it fit."""
    use = config.model.use
    if use is not None and use.vision is not None and use.vision.freeze_tower:
        return ""  # the tower is counted as if it were trained
    why = why_it_cannot_fit(found, swap_bytes() if machine.is_cpu else 0)
    if not why:
        return ""
    fits = next((one for one in ways_to_fit(config, sizes, machine, given) if one.fits), None)
    if fits is None:
        return f"{why}. No single setting makes it fit: take a smaller model or more devices"
    return f"{why}. The smallest change that makes it fit: {fits.text} ({fits.peak_bytes / GIB:.1f} GiB)"


class Peaks:
    """A watcher of a trainer, which asks the ranks for their peaks of memory after steps 1, 2, 4, 8 and so on."""

    def __init__(self, roles: Callable[[], Iterable[Any]], folder: Path) -> None:
        self._roles = roles
        self._path = folder / PEAKS_FILE
        self._steps = 0
        self._found: dict[str, int] = {}

    def __call__(self, values: Mapping[str, float]) -> None:
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        for role in self._roles():
            if isinstance(role, TrainHandle):
                peak = ranks.agree(int(role.device_memory()["peak"].value))
                self._found[role.role] = max(peak, self._found.get(role.role, 0))
        if ranks.is_first():
            _write(self._path, {"roles": self._found})


def _write(path: Path, data: Mapping[str, Any]) -> None:
    if not ranks.is_first():
        return
    partial = path.with_suffix(".json.partial")
    try:
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        LOG.warning("%s was not written: %s", path, error.strerror or error)


__all__ = ["Peaks", "foretell", "why_refused"]
