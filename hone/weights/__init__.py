"""Weight sync: send named tensors from a trainer to rollout replicas in buckets, and compare checksums.

Read `base` (the interface), `settings`, `snapshot` (what is sent), `sender` (makes the transport), `sync` (drives it in
the trainer), `delivery` (receives in a rollout server), `wants` (learns which parts a server needs), `transports/`
(`TRANSPORTS` names them), `digests/` (checksums). `in_process` copies within one process. This file imports no torch.
"""

from hone.registry import Entry, Registry

TRANSPORTS = Registry(
    "weight transport",
    {
        "collective": Entry(
            "hone.weights.transports.collective:CollectiveEngine", "hone.weights.settings:CollectiveSettings"
        ),
        "delta": Entry("hone.weights.transports.delta:DeltaEngine", "hone.weights.settings:DeltaSettings"),
        "disk": Entry("hone.weights.transports.disk:DiskEngine", "hone.weights.settings:DiskSettings"),
        "ipc": "hone.weights.transports.ipc.by_rank:ByRankEngine",
    },
)
LOOPBACK = "127.0.0.1"
PATIENCE = 1 / 3  # of the deadline of a sync: how long one silent replica may hold up the others
ANCHOR_EVERY = 20  # syncs of `delta`; one in this many sends everything

__all__ = ["ANCHOR_EVERY", "LOOPBACK", "PATIENCE", "TRANSPORTS"]
