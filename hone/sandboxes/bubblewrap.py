"""The command line of bubblewrap: namespaces of its own, and a file system that holds only what a program needs.

https://github.com/containers/bubblewrap. The limits of memory, processes and files come from `confinement`, which sets
them before bubblewrap starts.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from hone.sandboxes.kernel.mounts import ZEROS

TRIAL_S = 30.0


def installed() -> str:
    """The path of bubblewrap; empty if it is not installed."""
    return shutil.which("bwrap") or ""


@functools.cache
def why_no_namespaces(user: int) -> str:
    """Why bubblewrap cannot make its namespaces here; empty if it can. `user`: who runs it; -1: this process's user."""
    command = [installed(), "--unshare-all", "--uid", "65534", "--gid", "65534", "--ro-bind", "/", "/"]
    command += ["--proc", "/proc", "--dev", "/dev", "--", "true"]
    alone: dict[str, Any] = {"user": user, "group": user, "extra_groups": []} if user >= 0 else {}
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_S, cwd="/", check=False, **alone)
    except (OSError, subprocess.SubprocessError) as error:
        return f"bwrap cannot be run: {error}"
    said = done.stderr.decode("utf-8", "replace").strip()
    return "" if done.returncode == 0 else f"bwrap cannot make its namespaces: {said or f'status {done.returncode}'}"


def command(
    folder: str, readable: Sequence[str], environment: Mapping[str, str], descriptors: tuple[int, int], network: bool
) -> list[str]:
    """Return the beginning of a program's command line; `descriptors`: the seccomp filter, and the pipe for its end."""
    seccomp, status = descriptors
    found = [installed(), "--unshare-all", *(["--share-net"] if network else []), "--die-with-parent", "--new-session"]
    found += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--clearenv"]
    for name, value in environment.items():
        found += ["--setenv", name, value]
    for path in readable:
        if not path.startswith("/proc/"):
            found += ["--ro-bind-try", path, path]
    found += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--dev-bind",
        ZEROS,
        "/dev/zero",
        "--tmpfs",
        "/dev/shm",
        "--remount-ro",
        "/dev/shm",
        "--remount-ro",
        "/dev",
    ]
    found += ["--bind", folder, folder, "--remount-ro", "/", "--chdir", folder]
    return [*found, "--seccomp", str(seccomp), "--json-status-fd", str(status), "--"]


__all__ = ["command", "installed", "why_no_namespaces"]
