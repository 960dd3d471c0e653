"""Sandboxes: run code that a policy wrote, without giving it the rights of hone.

Read in this order: `base` (the contract), `local` (hone's side of a sandbox on this machine), `warm` (the process that
starts programs), `attendant` (watches one program), `confinement` (what a program gives up before it begins), `kernel`
(rules for files, system calls, mounts, cgroups), `bubblewrap`, `choice` (which one a name means). Plug-ins add
sandboxes of services.
"""

from hone.registry import Registry

SANDBOXES = Registry(
    "sandbox",
    {
        "auto": "hone.sandboxes.choice:automatic",
        "landlock": "hone.sandboxes.choice:landlock",
        "bubblewrap": "hone.sandboxes.choice:bubblewrap",
    },
)
"""Functions of (`Limits`, url, image) that return a `SandboxHost`; a text that the run file does not set is empty.

That of a service may be a class with a static method `configured() -> str`: whether its key and what else it needs are
here, for `hone doctor`, without asking the service.
"""

__all__ = ["SANDBOXES"]
