"""Sandboxes: run code that a policy wrote, without giving it the rights of hone.

Read in this order: `base` (the contract), `local` (hone's side of a sandbox on this machine), `warm` (the process that
starts programs), `attendant` (watches one program), `confinement` (what a program gives up before it begins), `kernel`
(rules for files, system calls, mounts), `bubblewrap`, `remote` (SandboxFusion), `hosted` (machines of a service),
`inside` (what hone runs in them), `e2b`, `daytona`, `modal` (three services), `choice` (which one a name means).
"""

from hone.registry import Entry, Registry

SANDBOXES = Registry(
    "sandbox",
    {
        "auto": "hone.sandboxes.choice:automatic",
        "landlock": "hone.sandboxes.choice:landlock",
        "bubblewrap": "hone.sandboxes.choice:bubblewrap",
        "sandbox_fusion": "hone.sandboxes.remote:SandboxFusion",
        "e2b": "hone.sandboxes.e2b:e2b",
        "daytona": "hone.sandboxes.daytona:daytona",
        "modal": Entry("hone.sandboxes.modal:modal_sandboxes", requires=("modal",)),
    },
)
"""Functions of (`Limits`, url, image) that return a `SandboxHost`; a text that the run file does not set is empty."""

__all__ = ["SANDBOXES"]
