"""Weight sync: named tensors from a trainer to rollout replicas, in buckets, proven by digest.

`TRANSPORTS` names the ways they can travel to another process (each a `CheckpointEngine`); `base` holds the contract,
`sync` drives it from the trainer, `door` is what a rollout server's process opens. Inside one process nothing travels:
`local`. This file imports no torch.
"""

from hone.registry import Entry, Registry

TRANSPORTS = Registry(
    "weight transport",
    {
        "collective": Entry("hone.weights.collective:CollectiveEngine", "hone.weights.settings:CollectiveSettings"),
        "delta": Entry("hone.weights.delta:DeltaEngine", "hone.weights.settings:DeltaSettings"),
        "disk": Entry("hone.weights.disk:DiskEngine", "hone.weights.settings:DiskSettings"),
        "ipc": "hone.weights.ipc:IpcEngine",
    },
)
LOOPBACK = "127.0.0.1"
ANCHOR_EVERY = 20  # syncs of `delta`, of which one sends everything

__all__ = ["ANCHOR_EVERY", "LOOPBACK", "TRANSPORTS"]
