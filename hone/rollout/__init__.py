"""Rollout engines: they continue token ids, and return log-probs and the weight version of each token.

In reading order: `base` (the contracts), `settings`, `router` and `replicas` (several engines behind one `generate`),
`pending` (a request without its whole answer), `placement` (which replica gets it), `lending` (a server on the
trainer's device), `heartbeat` (notices one that hangs), `admission` (checks before a request is taken),
`prompt_scores` (log-probs of a prompt), `adapters` (LoRA), `images`; `builtin/` is an engine of its own, `servers/`
has adapters of engines in other processes. This file imports no torch.
"""

from hone.registry import Registry

ROLLOUT_ENGINES = Registry(
    "rollout engine",
    {
        "builtin": "hone.rollout.builtin.engine:BuiltinEngine",
        "vllm": "hone.rollout.servers.vllm:VllmServer",
    },
)

__all__ = ["ROLLOUT_ENGINES"]
