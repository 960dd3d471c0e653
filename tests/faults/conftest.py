"""Fixtures of other folders that planted faults are tried with."""

from tests.rollout.conftest import forward, gap, runner, tiny, tokenizer
from tests.weights.conftest import replicas

__all__ = ["forward", "gap", "replicas", "runner", "tiny", "tokenizer"]
