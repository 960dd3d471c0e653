"""Settings of the weight sync: by which way weights travel, and how their arrival is proven. No torch in here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import SerializeAsAny

from hone.config import Choice, Config, FromRegistry, setting
from hone.weights import ANCHOR_EVERY, LOOPBACK, TRANSPORTS


class CollectiveSettings(Choice):
    """Broadcasts in a process group of its own."""

    name: str = "collective"
    host: str = setting(
        LOOPBACK,
        "address of the trainer's machine, or its name, on which it listens; loopback becomes its address in the Ray "
        "cluster where servers are on other machines",
    )


class DiskSettings(Choice):
    """Files in a folder that both sides see."""

    name: str = "disk"
    folder: str = setting("", "where the files go; empty: the temporary folder")


class DeltaSettings(Choice):
    """What changed since the last sync, over another transport."""

    name: str = "delta"
    over: Literal["collective", "ipc"] = setting("collective", "transport that carries the changes")
    host: str = setting(LOOPBACK, "as for collective, which is the only one that listens at an address")
    anchor_every: int = setting(ANCHOR_EVERY, "syncs, of which one sends everything", ge=1)


class WeightSyncConfig(Config):
    """How the trainer's weights reach the rollout."""

    transport: Annotated[SerializeAsAny[Choice] | None, FromRegistry(TRANSPORTS)] = setting(
        None,
        "way they travel to servers (collective, delta, disk, ipc); default: ipc, and collective where some servers "
        "are on other machines. Inside one process they are copied",
    )
    bucket_mib: int = setting(256, "size of one bucket; two of them exist at a time", unit="MiB", ge=1)
    verify: Literal["digest", "probe"] = setting(
        "digest", "proof after each sync: digest of every tensor; probe: log-probs of a prompt on both sides too"
    )
    timeout_s: float = setting(600.0, "deadline of one sync", unit="s", gt=0)
