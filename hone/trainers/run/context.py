"""Context that every part of a run gets: its folder, its trackers, its metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hone.data.rendering import Renderer
from hone.runtime.settings import RuntimeConfig
from hone.tracking.base import RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.metrics import Timer
from hone.tracking.settings import TrackingConfig
from hone.trainers.run.profiler import Profiler
from hone.trainers.run.recorder import Recorder


@dataclass(frozen=True, slots=True)
class RunControl:
    """Means by which the caller of a run follows it, ends it early, or has it repeat another."""

    on_step: Callable[[int, Mapping[str, float]], None] | None = None  # gets each step's metrics, on the run's thread
    stop: threading.Event = field(default_factory=threading.Event)  # set: end after this step, as the first Ctrl-C does
    replay: Path | None = None  # the `schedule.jsonl` of an asynchronous run that this run repeats


@dataclass(frozen=True, slots=True)
class RunContext:
    """Places to which a run writes its files, figures and timings."""

    folder: Path
    tracking: Tracking
    recorder: Recorder
    profiler: Profiler
    control: RunControl = field(default_factory=RunControl)


def untracked_context(folder: Path, renderer: Renderer) -> RunContext:
    """A context without trackers: nothing is written, messages go to standard error."""
    decode = renderer.decode
    hub = Tracking(TrackingConfig(trackers=()), RunInfo(run_dir=folder), lambda ids: decode(ids, keep_special=True))
    return RunContext(folder, hub, Recorder(Timer()), Profiler(None, None, RuntimeConfig(), folder, hub))
