"""Share of the machine that this process may use: affinity, and limits of its container (cgroups 1 and 2).

Reward processes import this file: standard library only.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # within a container, its own limits
MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
MEMORY = (  # limit and use, version 2 and 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def cores() -> int:
    """Return this process's number of cores. A limit in Kubernetes is a quota of time, which no affinity shows."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def memory() -> tuple[int, int]:
    """Total and free bytes: of the machine, or of the container where its limit is lower."""
    total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMINFO.is_file():
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_file, used_file in MEMORY:
        limit = _number(limit_file)
        if limit is not None and limit < total:
            return limit, max(0, min(free, limit - (_number(used_file) or 0)))
    return total, free


def resident() -> tuple[int, int]:
    """Bytes of this process in memory, and the part of them that is of files or shared; zeros where no file says it."""
    if not STATM.is_file():
        return 0, 0
    fields = STATM.read_text(encoding="ascii").split()
    page = os.sysconf("SC_PAGE_SIZE")
    return int(fields[1]) * page, int(fields[2]) * page


def _quota() -> float | None:
    words = _text("cpu.max").split()  # version 2: quota and period in one file; "max" is no quota
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = _number("cpu/cpu.cfs_quota_us"), _number("cpu/cpu.cfs_period_us")  # version 1; -1 is no quota
    return quota / period if quota and period else None


def _number(name: str) -> int | None:
    text = _text(name)
    return int(text) if text.isdigit() else None


def _text(name: str) -> str:
    path = CGROUP / name
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


__all__ = ["STATM", "cores", "memory", "resident"]
