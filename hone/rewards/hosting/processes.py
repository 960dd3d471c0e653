"""Processes that a pool of rewards starts, and what each of them loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.processes.request_process import ChildLost, ChildSpec
from hone.rewards.settings import RewardConfig

START_TIMEOUT_S = 120.0  # importing the reward functions, on a busy machine
MODULE = "hone.rewards.worker"


@dataclass(frozen=True, slots=True)
class Hosting:
    """Workers of a pool's processes, and the number of processes."""

    components: Mapping[str, Mapping[str, Any]]  # name -> what a process needs to load it, `timeout_s`, `most_calls`
    workers: int
    module: str = MODULE
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = START_TIMEOUT_S
    budget: int | None = None  # largest cost of a batch; None: the processes share the queue evenly
    log: Path | None = None  # process 0 writes what it prints to `<log>-0.log`

    def child(self, index: int) -> ChildSpec:
        """Process number `index`: one thread unless asked otherwise, and sets of strings in the same order in all."""
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        log = self.log and self.log.with_name(f"{self.log.name}-{index}.log")
        variables = {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": "0", **self.environment}
        return ChildSpec("reward process", self.module, variables, log)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The reply of a process that has loaded its components: the names of some of them."""

    concurrent: frozenset[str]
    needs_ground_truth: tuple[str, ...] = ()
    whole_groups: frozenset[str] = frozenset()

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Loaded:
        """Read a reply. Raises ConfigError if a function could not be loaded, ChildLost for a malformed reply."""
        if "error" in reply:
            raise ConfigError(str(reply["error"]))
        names = [reply.get("concurrent"), reply.get("needs_ground_truth", []), reply.get("whole_groups", [])]
        if not all(isinstance(some, list) and all(isinstance(one, str) for one in some) for some in names):
            raise ChildLost(f"the reward process broke the protocol: lists of names were due, found {reply!s:.200}")
        concurrent, needs_ground_truth, whole_groups = names
        return cls(frozenset(concurrent or ()), tuple(needs_ground_truth or ()), frozenset(whole_groups or ()))


def functions(config: RewardConfig, logs: Path | None = None) -> Hosting:
    """The components that are functions, in processes that they share; `logs`: folder of what they print."""
    components = {
        name: {
            "reward": part.reward,
            "options": dict(part.options),
            "timeout_s": part.timeout_s,
            "most_calls": part.max_calls_per_step,
        }
        for name, part in config.components.items()
        if part.model is None
    }
    return Hosting(components, config.workers if components else 0, log=logs and logs / "functions")


__all__ = ["START_TIMEOUT_S", "Hosting", "Loaded", "functions"]
