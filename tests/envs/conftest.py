"""Fixtures of the rollout's tests: agents talk to a real engine."""

from tests.rollout.conftest import finish, forward, gap, tiny, tokenizer

__all__ = ["finish", "forward", "gap", "tiny", "tokenizer"]
