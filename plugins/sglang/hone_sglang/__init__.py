"""SGLang as a rollout server of hone.

In reading order: `server`, the adapter in hone's process; `inside`, the code that runs in SGLang's processes, which
find this package and hone's in the server's folder; `cpu_patches`, which let SGLang run on a CPU.
"""

from hone.rollout import ROLLOUT_ENGINES

PLUGIN_API = 1


def register() -> None:
    """Add the server to hone's registry."""
    ROLLOUT_ENGINES.register("sglang", "hone_sglang.server:SglangServer")
