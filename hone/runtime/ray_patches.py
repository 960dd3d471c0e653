"""Ray as it is released, made to do what hone needs. Patches go by name, so that only `ray.py` imports Ray."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

LOOPBACK = "127.0.0.1"


@contextmanager
def on_loopback() -> Iterator[None]:
    """Within the block, `ray.init(_node_ip_address="127.0.0.1")` starts a cluster that listens on loopback alone.

    Ray's servers bind to loopback when that is the node's address, but `ray.init` first replaces it with an address
    that other machines reach, and then every one of its processes listens on all interfaces.
    https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/_private/services.py (`resolve_ip_for_localhost`)
    """
    services = importlib.import_module("ray._private.services")
    original = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: LOOPBACK if host == LOOPBACK else original(host)
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = original
