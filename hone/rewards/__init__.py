"""Rewards: score answers with functions in worker processes, or with reward models. Each call has a deadline.

Read `base` (what a reward function is), `rubric` (weighs components, scores groups), `pool` (the worker processes).
`REWARDS` names the built-in reward functions.
"""

from __future__ import annotations

from hone.registry import Entry, Registry

REWARDS = Registry(
    "reward",
    {
        "code": "hone.rewards.code:Code",
        "exact_match": "hone.rewards.exact_match:exact_match",
        "gsm8k": "hone.rewards.gsm8k:gsm8k",
        "judge": "hone.rewards.judge:Judge",
        "math": Entry("hone.rewards.math:math", requires=("math_verify",)),
        "reasoning_gym": Entry("hone.rewards.reasoning_gym:reasoning_gym", requires=("reasoning_gym",)),
    },
)
