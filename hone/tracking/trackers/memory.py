"""Peak memory of this process by phase, in `memory.json` of the run folder.

    CPU            a thread looks every 10 ms, or as often as takes 2 % of a core: what the process holds, without freed
                   memory that is kept
    accelerator    the peak of torch's allocator, which begins anew with each phase

In a run by Ray the ranks are other processes; their peaks are in `peaks.json`.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from hone import machine
from hone.config import Choice
from hone.tracking.base import FINISHED, RunInfo, Tracker

MEMORY_FILE = "memory.json"
LOAD = "load"  # everything before the first step
BETWEEN = "other"  # no phase
EVERY_S, SHARE = 0.01, 0.02  # the C library takes half a millisecond to say what is used
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
STATUS, MAPS = Path("/proc/self/status"), Path("/proc/self/smaps")
FALL = 0.02  # of what is resident: a smaller fall of the pages of files is not looked into


class Gauge(Protocol):
    """Memory of a process."""

    @property
    def loaded(self) -> int:
        """Peak bytes until now."""

    def take(self) -> int:
        """Peak bytes since the last call, or bytes of this moment where only these are known."""


class MemoryTracker(Tracker):
    """Writes the largest number of bytes that each phase has held."""

    own_thread = False

    def __init__(self, settings: Choice, run: RunInfo) -> None:
        self._path = run.run_dir / MEMORY_FILE
        self.where = str(self._path)
        self._device = _accelerator()
        self._gauge: Gauge = _Accelerator(self._device) if self._device else _Host()
        self._phase = BETWEEN
        self._peaks = {LOAD: self._gauge.loaded}
        self._written: dict[str, int] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        if not self._device:
            threading.Thread(target=self._look, name="hone-memory", daemon=True).start()

    def phase(self, name: str) -> None:
        self._see()
        self._phase = name or BETWEEN

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._keep()

    def _keep(self) -> None:
        with self._lock:
            found = dict(self._peaks)
        if found != self._written:
            self._written = found
            _write(self._path, {"device": self._device or "cpu", "phases": found})

    def close(self, outcome: str = FINISHED) -> None:
        self._over.set()
        self._keep()  # the last checkpoint comes after the last step's figures

    def _look(self) -> None:
        wait = EVERY_S
        while not self._over.wait(wait):
            begin = time.thread_time()
            self._see()
            wait = max((time.thread_time() - begin) / SHARE, EVERY_S)

    def _see(self) -> None:
        with self._lock:
            self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), self._gauge.take())


class _Accelerator:
    def __init__(self, kind: str) -> None:
        self._module = getattr(sys.modules["torch"], kind)
        self.loaded = int(self._module.max_memory_allocated())
        self._module.reset_peak_memory_stats()

    def take(self) -> int:
        peak = int(self._module.max_memory_allocated())
        self._module.reset_peak_memory_stats()
        return peak


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class _Host:
    """Memory of this process on Linux; elsewhere, and with another C library, its resident size."""

    def __init__(self) -> None:
        self.loaded = _peak_resident()
        self._heap = _mallinfo()
        if self._heap is None:
            return
        ctypes.CDLL(None).malloc_trim(0)  # so that what is resident is used
        resident, self._shared = machine.resident()
        heap = self._heap()
        self._written = written_of_files()
        # Python's own memory, stacks
        self._rest = resident - self._shared - self._written - heap.uordblks - heap.hblkhd

    def take(self) -> int:
        resident, shared = machine.resident()
        if self._heap is None:
            return resident
        if self._shared - shared > FALL * resident:  # the optimizer's first step writes all weights
            self._written, self._shared = written_of_files(), shared
        self._shared = max(self._shared, shared)
        heap = self._heap()
        return int(self._rest + shared + self._written + heap.uordblks + heap.hblkhd)


def written_of_files() -> int:
    """Bytes of the pages of mapped files that this process has written, and so has for itself.

    Weights that were read from a file are such pages once they are trained: no longer shared, and not of the heap.
    """
    found, of_file = 0, False
    for line in MAPS.read_bytes().splitlines() if MAPS.is_file() else ():
        words = line.split()
        if not words[0].endswith(b":"):  # address, rights, offset, device, inode, path
            of_file = len(words) > 5 and words[4] != b"0"
        elif of_file and words[0] == b"Anonymous:":
            found += int(words[1]) * 1024
    return found


@lru_cache(maxsize=1)
def _mallinfo() -> Any:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not machine.STATM.is_file():
        return None
    library.mallinfo2.restype = _Heap
    return library.mallinfo2


def _peak_resident() -> int:
    if not STATUS.is_file():
        return 0
    lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _accelerator() -> str:
    """The kind of accelerator that torch computes on in this process, such as `cuda`; empty: a CPU."""
    torch = sys.modules.get("torch")
    found = getattr(torch, "accelerator", None)
    if found is None or not found.is_available():
        return ""
    kind = str(found.current_accelerator().type)
    return kind if hasattr(getattr(torch, kind, None), "reset_peak_memory_stats") else ""


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
