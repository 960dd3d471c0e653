"""Rollout engines: they continue token ids and say with which weights and how probable each token was.

`ROLLOUT_ENGINES` names them; `base.RolloutEngine` is what each of them can do. This file imports no torch.
"""

from hone.registry import Registry

ROLLOUT_ENGINES = Registry(
    "rollout engine",
    {
        "builtin": "hone.rollout.builtin:BuiltinEngine",
        "vllm": "hone.rollout.vllm:VllmServer",
        "sglang": "hone.rollout.sglang:SglangServer",
    },
)

__all__ = ["ROLLOUT_ENGINES"]
