"""Weight sync: named tensors from a trainer to rollout replicas, in buckets, proven by digest.

`TRANSPORTS` names the ways they can travel; `base` holds the contract. This file imports no torch.
"""

from hone.registry import Registry

TRANSPORTS = Registry("weight transport", {})

__all__ = ["TRANSPORTS"]
