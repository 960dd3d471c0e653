"""Rewards: what an answer is worth, judged in processes of their own, each call with a deadline.

`REWARDS` names the built-in reward functions; `hone.rewards.rubric.Rubric` scores groups of trajectories with them.
"""

from __future__ import annotations

from hone.registry import Entry, Registry

REWARDS = Registry(
    "reward",
    {
        "exact_match": "hone.rewards.exact_match:exact_match",
        "gsm8k": "hone.rewards.gsm8k:gsm8k",
        "math": Entry("hone.rewards.math:math", requires=("math_verify",)),
        "reasoning_gym": Entry("hone.rewards.reasoning_gym:reasoning_gym", requires=("reasoning_gym",)),
    },
)
