"""Sandboxes by the names of the registry, and the check that one works here.

Nothing runs without a sandbox: if none works, the error says why for each.
"""

from __future__ import annotations

from hone.sandboxes import SANDBOXES
from hone.sandboxes.base import Limits, SandboxHost, SandboxLost, SandboxRefused
from hone.sandboxes.confinement import why_not
from hone.sandboxes.local import LocalSandboxes

LOCAL = ("landlock", "bubblewrap")  # in order of preference


def make_sandboxes(name: str, limits: Limits, url: str = "", image: str = "") -> SandboxHost:
    """The sandboxes that a run file names; `url`, `image`: of a remote service.

    Raises SandboxRefused, UnknownName, or CannotLoad if a package is missing.
    """
    host: SandboxHost = SANDBOXES.get(name)(limits, url, image)
    return host


def automatic(limits: Limits, url: str, image: str) -> LocalSandboxes:
    """The first local sandbox that works here. Raises SandboxRefused with the reason for each."""
    if url or image:
        raise SandboxRefused(
            "url and image belong to a remote sandbox; name it (hone list sandboxes), or remove url and image"
        )
    reasons = []
    for name in LOCAL:
        if not (reason := why_not(name)):
            return _local(name, limits, url, image)
        reasons.append(f"{name}: {reason}")
    found = "; ".join(reasons)
    raise SandboxRefused(f"no sandbox works on this machine, and code is never run without one ({found})")


def landlock(limits: Limits, url: str, image: str) -> LocalSandboxes:
    """Landlock, seccomp and resource limits."""
    return _local("landlock", limits, url, image)


def bubblewrap(limits: Limits, url: str, image: str) -> LocalSandboxes:
    """Namespaces by the program bubblewrap."""
    return _local("bubblewrap", limits, url, image)


def _local(name: str, limits: Limits, url: str, image: str) -> LocalSandboxes:
    if url or image:
        raise SandboxRefused(
            f"{name} runs on this machine and has no url and no image; remove them, or choose a remote sandbox"
        )
    if reason := why_not(name):
        raise SandboxRefused(f"{name}: {reason}")
    return LocalSandboxes("landlock" if name == "landlock" else "bubblewrap", limits)


async def examine(name: str) -> tuple[bool, str]:
    """Run a program in a local sandbox: whether that worked, and what the sandbox stops or why it does not work."""
    try:
        host = make_sandboxes(name, Limits())
        stops = await host.start()
        sandbox = host.open()
        try:
            ran = await sandbox.run(["python", "-c", "print(6 * 7)"], timeout_s=30.0)
        finally:
            await sandbox.close()
            await host.close()
    except (SandboxRefused, SandboxLost) as error:
        return False, str(error).replace("\n", " ")
    if ran.stdout.strip() != b"42":
        return (
            False,
            f"its first program ended with status {ran.status}: {ran.stderr.decode('utf-8', 'replace')[-200:]}",
        )
    return True, f"stops {stops}"


__all__ = [
    "LOCAL",
    "automatic",
    "bubblewrap",
    "examine",
    "landlock",
    "make_sandboxes",
]
