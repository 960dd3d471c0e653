"""`run.json`: the facts about a run that are not settings: when it ran, on what, from which commit, how it ended."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from hone import __version__
from hone.machine import cores, memory
from hone.tracking.base import RunInfo

RUN_FILE = "run.json"
STOPPED = (130, 143, 15)  # codes of a SystemExit that SIGINT or SIGTERM caused: as shells count them, and Ray's
_GIT_S = 5.0  # a command of git that takes longer is not waited for


def write_facts(run: RunInfo, started: str | None, outcome: str | None, trackers: Mapping[str, str]) -> str:
    """Write `run.json` and return when the run's first launch began; `started` is that time, once it is known.

    `outcome`: how the run ended; None while it goes on. Raises OSError.
    """
    path = run.run_dir / RUN_FILE
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if started is None:
        started = (_started_before(path) if run.resumed_from is not None else None) or now
    facts = {
        "name": run.name,
        "total_steps": run.total_steps,
        "started": started,
        "resumed_from": run.resumed_from,
        "ended": None if outcome is None else now,
        "outcome": outcome,
        "trackers": dict(trackers),
        "hone": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": hardware(),
        "commit": commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return started


@cache
def hardware() -> str:
    """The accelerators that this process sees, if torch is loaded and has any; then cores and memory.

    The driver of a run on a cluster sees its own machine only.
    """
    torch = sys.modules.get("torch")
    found = []
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        device = getattr(torch, accelerator.current_accelerator().type)
        found = [f"{accelerator.device_count()} x {device.get_device_name(0)}"]
    return ", ".join([*found, f"{cores()} cores{_model()}", f"{memory()[0] / 2**30:.0f} GiB"])


@cache
def commit() -> str:
    """The git commit of the working folder, `+` behind it if files have changed since; empty outside of git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}{'+' if head and _git('status', '--porcelain', '--untracked-files=no') else ''}"


def _git(*command: str) -> str:
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _model() -> str:
    """The model of the processor in brackets, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f" ({model})" if model else ""


def _started_before(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("started")
    except (OSError, ValueError):
        return None
