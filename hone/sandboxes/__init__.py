"""Sandboxes: run code that a policy wrote, without giving it the rights of hone.

Read in this order: `base` (the contract), `local` (hone's side of a sandbox on this machine), `warm` (the process that
starts programs), `attendant` (watches one program), `confinement` (what a program gives up before it begins),
`landlock`, `system_calls`, `bubblewrap`, `remote` (a service over HTTP), `choice` (which one a name means).
"""

from hone.registry import Registry

SANDBOXES = Registry(
    "sandbox",
    {
        "auto": "hone.sandboxes.choice:automatic",
        "landlock": "hone.sandboxes.choice:landlock",
        "bubblewrap": "hone.sandboxes.choice:bubblewrap",
        "sandbox_fusion": "hone.sandboxes.remote:SandboxFusion",
    },
)
"""Functions of (`Limits`, url) that return a `SandboxHost`."""

__all__ = ["SANDBOXES"]
