"""Settings of implicit process rewards. Imports no torch."""

from __future__ import annotations

from hone.algorithms.settings import AdvantageSettings
from hone.config import setting


class PrimeSettings(AdvantageSettings):
    """Leave-one-out baselines for the outcome and, token by token, for a process reward model (PRIME)."""

    name: str = "prime"
    required_fields = frozenset({"rewards", "process_rewards"})
    gamma: float = setting(1.0, "discount of process rewards per generated token", ge=0, le=1)
    process_coef: float = setting(1.0, "weight of the process rewards; the outcome's weight is 1", ge=0)
    whiten: bool = setting(False, "zero mean and unit variance over the batch, as the paper's own code has it")
