"""Create the trainer's side of the transport in the run file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.weights import TRANSPORTS
from hone.weights.base import CheckpointEngine
from hone.weights.settings import CollectiveSettings, DeltaSettings, DiskSettings, WeightSyncConfig

DEFAULT = "ipc"


def make_sender(config: WeightSyncConfig, token: str) -> CheckpointEngine:
    """Create the sender. Raises ConfigError for a host or folder that this machine cannot use."""
    chosen = config.transport
    options: dict[str, Any] = {}
    if isinstance(chosen, DiskSettings):
        options = {"folder": _made(chosen.folder)} if chosen.folder else {}
    elif isinstance(chosen, DeltaSettings) and chosen.over != CollectiveSettings().name:
        options = {"over": chosen.over, "anchor_every": chosen.anchor_every}
    elif chosen is not None:  # of a plug-in too: its settings are the arguments of its class
        options = {key: getattr(chosen, key) for key in type(chosen).model_fields if key != "name"}
    if "host" in options:
        _listen(options["host"])
    transport = TRANSPORTS.get(DEFAULT if chosen is None else chosen.name)
    sender: CheckpointEngine = transport(config.bucket_mib * 2**20, config.timeout_s, token, **options)
    return sender


def _listen(host: str) -> None:
    """Raises ConfigError if this machine cannot listen on `host`."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"weights.transport.host: this machine cannot listen on {host!r} ({error})") from error


def _made(folder: str) -> Path:
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"weights.transport.folder: {folder!r} cannot be created ({error})") from error
    return path


__all__ = ["make_sender"]
