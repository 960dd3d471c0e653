"""Settings of the transport."""

from __future__ import annotations

from hone.config import Choice, setting
from hone.weights import LOOPBACK


class NixlSettings(Choice):
    """Reads by NIXL: RDMA where there is any, else TCP."""

    name: str = "nixl"
    host: str = setting(LOOPBACK, "as for collective")
