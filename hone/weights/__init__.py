"""Weight sync: named tensors from a trainer to rollout replicas, in buckets, proven by digest.

`TRANSPORTS` names the ways they can travel to another process (each a `CheckpointEngine`); `base` holds the contract,
`sync` drives it from the trainer, `door` is what a rollout server's process opens. Inside one process nothing travels:
`local`. This file imports no torch.
"""

from hone.registry import Registry

TRANSPORTS = Registry(
    "weight transport",
    {
        "collective": "hone.weights.collective:CollectiveEngine",
        "delta": "hone.weights.delta:DeltaEngine",
        "disk": "hone.weights.disk:DiskEngine",
        "ipc": "hone.weights.ipc:IpcEngine",
    },
)

__all__ = ["TRANSPORTS"]
