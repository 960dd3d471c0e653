"""Traces of the processes of a run, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    Profiler.step --> LocalWorkerGroup.traced --> this process (under torchrun, each rank does the same)
                 '--> RayWorkerGroup.traced ----> the driver, and the ranks of each pool

A trace that cannot be recorded or written becomes a line of text, because the step that it describes is worth more. If
the step fails, recording ends on every rank and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from hone.platforms.base import current_platform


@dataclass(slots=True)
class Traced:
    """The files of the traces of one step, and why others are missing."""

    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class ProcessTrace:
    """Records the operators of all threads of this process, and the kernels of its device."""

    def __init__(self) -> None:
        self._recording: profile | None = None

    def begin(self) -> str:
        """Begin to record; returns why it is not possible, or an empty string."""
        if autograd_profiler._is_profiler_enabled:  # torch 2.13 would end it, and crash when its owner ends it
            return "another torch.profiler records this process"
        own = current_platform().profiler_activity
        activities = [ProfilerActivity.CPU, *([getattr(ProfilerActivity, own)] if own else [])]
        every_thread = _ExperimentalConfig(profile_all_threads=True)  # rollout and workers may have their own
        try:
            # Without `acc_events`, torch 2.11 warns that a second cycle clears the events of the first; there is one.
            recording = profile(activities=activities, experimental_config=every_thread, acc_events=True)
            recording.start()
        except Exception as error:  # noqa: BLE001  whatever it is, the run goes on without the trace
            return _text(error)
        self._recording = recording
        return ""

    def end(self, path: Path | None) -> str:
        """Write what was recorded to `path`; None: drop it. Returns why it is not possible, or an empty string.

        Creates the folder of `path` in a run folder that exists.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return ""
        try:
            recording.stop()
            if path is not None:
                path.parent.mkdir(exist_ok=True)
                path.open("wb").close()  # raises OSError; the profiler only logs that it cannot open the file
                recording.export_chrome_trace(str(path))
                if not path.stat().st_size:
                    raise OSError("the profiler wrote nothing")
        except Exception as error:  # noqa: BLE001  see `begin`
            return _text(error)
        return ""


@contextmanager
def own_trace(path: Path, found: Traced) -> Iterator[None]:
    """Trace this process during the block, into `path`; an error of the block drops the trace."""
    trace = ProcessTrace()
    problem = trace.begin()
    try:
        yield
    except BaseException:
        trace.end(None)
        raise
    problem = problem or trace.end(path)
    if problem:
        found.problems.append(f"no trace {path}: {problem}")
    else:
        found.files.append(path)


def path_of(stem: Path, rank: int, pool: str = "") -> Path:
    """The file of a rank's trace: `step-3-rank-0.json`, in a pool of its own `step-3-<pool>-rank-0.json`."""
    return stem.with_name("-".join(part for part in (stem.name, pool, f"rank-{rank}.json") if part))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
