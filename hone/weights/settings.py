"""Settings of the weight sync: by which way weights travel, and how their arrival is proven. No torch in here."""

from __future__ import annotations

from typing import Literal

from hone.config import Config, setting


class WeightSyncConfig(Config):
    """How the trainer's weights reach the rollout."""

    transport: str = setting(
        "auto", "way they travel: local, ipc, collective, disk, delta; auto: local inside one process, else ipc"
    )
    bucket_mib: int = setting(256, "size of one bucket; two of them exist at a time", unit="MiB", ge=1)
    verify: Literal["digest", "probe"] = setting(
        "digest", "proof after each sync: digest of every tensor; probe: log-probs of a prompt on both sides too"
    )
    timeout_s: float = setting(600.0, "deadline of one sync", unit="s", gt=0)
