"""NIXL as a transport of weights: `settings`, and `transport` with both sides. Servers load this plug-in too."""

from hone.weights import TRANSPORTS

PLUGIN_API = 1


def register() -> None:
    """Add the transport to hone's registry."""
    TRANSPORTS.register("nixl", "hone_nixl.transport:NixlEngine", "hone_nixl.settings:NixlSettings", requires=("nixl",))
