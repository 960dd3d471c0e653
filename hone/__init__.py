"""hone: reinforcement learning and fine-tuning of language models after pre-training.

`api` is the Python API (`objects`: what its mappings may hold), `cli` the command line. A run, in reading order:
`trainers` (the loops), `algorithms`, `data`, `envs`, `rewards`, `rollout` (generates), `engines` (train), `weights`
(from engines to rollout), `workers` (join these), `runtime` (one process or many), `models`, `schedule`, `tracking`,
`platforms` (kinds of device), `processes` (children), `sandboxes`, `planner` (predicts a run), `diagnosis` (of a run
that went wrong), `migration` (from other frameworks), `service` (models that clients train), `testing` (contracts of
the parts, as tests). What all of them use: `types`, `spans`, `deadline`, `full_disk`, `machine` (its cores and memory),
`outage` (of a service), `registry`, `plugins`, and for run files `config`, `config_errors`, `composition`, `explain`,
`other_frameworks`. ARCHITECTURE.md has the levels and the reasons.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
PLUGIN_API = 1
"""Version of what plug-ins are written against: registries, protocols, `hone.testing`. One that breaks adds 1."""

__all__ = [
    "ConfigError",
    "Interrupted",
    "Result",
    "distill",
    "evaluate",
    "generate",
    "load",
    "prefer",
    "reward_model",
    "score",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the API with its first use: a reward process or `hone doctor` imports this package without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hone' has no attribute {name!r} (it has: {', '.join(__all__)})")
    return getattr(import_module("hone.api"), name)
