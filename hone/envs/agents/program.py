"""Agent programs: async functions that get a URL, a key and a prompt, and call the policy as often as they like.

    async def solve(base_url: str, api_key: str, prompt: Prompt) -> str | Verdict | None:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        reply = await client.chat.completions.create(model="policy", messages=list(prompt.messages))

The program calls the policy; no environment is involved. The rewards judge the text that it returns, or the policy's
output if it returns none; a `Verdict` may also have a reward, or one for each role. A request names its role as its
model: `model="solver"`. An exception means that the episode failed, which is not a reward of 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.config import ConfigError
from hone.registry import resolve
from hone.types import Prompt


@dataclass(frozen=True, slots=True)
class Verdict:
    """Statement of a program about its episode: Verdict("42", reward=1.0, metrics={"files_changed": 3.0})"""

    answer: str | None = None  # what the rewards judge; None: everything that the policy wrote
    reward: float | Mapping[str, float] | None = None  # added to the rewards of `reward.components`: of all, or by role
    metrics: Mapping[str, float] = field(default_factory=dict)  # recorded as the mean of rollout/<name>

    def of_role(self, role: str) -> float | None:
        """The reward of a role's trajectories; None: the program gave none."""
        return self.reward.get(role) if isinstance(self.reward, Mapping) else self.reward

    def check(self, roles: Sequence[str]) -> None:
        """Raise TypeError or ValueError unless it has texts, finite numbers, and all `roles` if rewards are by role."""
        if not isinstance(self.answer, str | None):
            raise TypeError(f"the answer of the verdict should be a text or None, found {self.answer!r:.80}")
        if isinstance(self.reward, Mapping):
            for role, reward in self.reward.items():
                _check_number(reward, f"the reward of the verdict for {role}")
        elif self.reward is not None:
            _check_number(self.reward, "the reward of the verdict")
        for name, value in self.metrics.items():
            _check_number(value, f"the metric {name} of the verdict")
        if isinstance(self.reward, Mapping) and set(self.reward) != set(roles):
            expected = ", ".join(roles) or "none: set episode.env.roles"
            found = ", ".join(self.reward) or "nobody"
            raise ValueError(f"the verdict has rewards for {found}; the roles are {expected}")


def _check_number(value: Any, what: str) -> None:
    """Raise TypeError or ValueError unless `value` is a finite number, such as one of NumPy or torch."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} should be a number, found {value!r:.80}")
    if not math.isfinite(value):
        raise ValueError(f"{what} should be a finite number, found {value!r:.80}")


class AgentProgram(Protocol):
    """One episode of an agent."""

    def __call__(self, base_url: str, api_key: str, prompt: Prompt) -> Awaitable[str | Verdict | None]: ...


def load_program(reference: str) -> AgentProgram:
    """Load the function that a run file names. Raises ConfigError if it does not exist or is not async."""
    try:
        program: Any = resolve(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"episode.env.program: {error}") from error
    called = program if inspect.isroutine(program) else getattr(program, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(called):
        raise ConfigError(
            f"episode.env.program: {reference} should be an async function (base_url, api_key, prompt); one that "
            "blocks would hold up every other episode"
        )
    found: AgentProgram = program
    return found


__all__ = ["AgentProgram", "Verdict", "load_program"]
