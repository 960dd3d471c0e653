"""Sandboxes of services: SandboxFusion, E2B, Daytona and Modal.

In reading order: `sandbox_fusion`; `hosted`, a machine of a service for each sandbox; `inside`, the part of hone that
runs in such a machine; the three services: `e2b`, `daytona`, `modal`.
"""

from hone.sandboxes import SANDBOXES

PLUGIN_API = 1


def register() -> None:
    """Add the sandboxes to hone's registry."""
    SANDBOXES.register("sandbox_fusion", "hone_hosted_sandboxes.sandbox_fusion:SandboxFusion")
    SANDBOXES.register("e2b", "hone_hosted_sandboxes.e2b:E2bSandboxes")
    SANDBOXES.register("daytona", "hone_hosted_sandboxes.daytona:DaytonaSandboxes")
    SANDBOXES.register("modal", "hone_hosted_sandboxes.modal:ModalSandboxes", requires=("modal",))
