"""Settings of the weight sync: its transport, and how the result is verified. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import SerializeAsAny

from hone.config import Choice, Config, FromRegistry, setting
from hone.weights import ANCHOR_EVERY, LOOPBACK, PATIENCE, TRANSPORTS


class CollectiveSettings(Choice):
    """Broadcasts in a separate process group."""

    name: str = "collective"
    host: str = setting(
        LOOPBACK,
        "address or name on which the trainer listens; if servers run on other machines, loopback is replaced by the "
        "trainer's address in the Ray cluster",
    )


class DiskSettings(Choice):
    """Files in a folder that both sides can read."""

    name: str = "disk"
    folder: str = setting("", "folder for the files; empty: the temporary folder")


class DeltaSettings(Choice):
    """Sends only changed elements, over another transport."""

    name: str = "delta"
    over: Literal["collective", "ipc"] = setting("collective", "transport that carries the changes")
    host: str = setting(LOOPBACK, "as for collective; ipc does not use it")
    anchor_every: int = setting(ANCHOR_EVERY, "one in this many syncs sends everything", ge=1)


class WeightSyncConfig(Config):
    """Transport of weights from the trainer to the rollout."""

    transport: Annotated[SerializeAsAny[Choice] | None, FromRegistry(TRANSPORTS)] = setting(
        None,
        "how weights reach servers (collective, delta, disk, ipc, or a plug-in's); default: ipc, or collective if some "
        "servers are on other machines. The built-in engine in the trainer's process copies them",
    )
    bucket_mib: int = setting(256, "size of one bucket; two of them exist at a time", unit="MiB", ge=1)
    verify: Literal["digest", "probe"] = setting(
        "digest", "check after each sync: a digest of all tensors; probe: also the log-probs of a prompt on both sides"
    )
    timeout_s: float = setting(600.0, "deadline of one sync", unit="s", gt=0)

    @property
    def patience_s(self) -> float:
        """Return the seconds for which one silent server may hold up the others."""
        return self.timeout_s * PATIENCE
