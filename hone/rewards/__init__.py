"""Rewards: score answers with functions in worker processes, or with reward models. Each call has a deadline.

In reading order: `base` (what a reward function is), `settings`, `rubric` (weighs components, scores groups), `pool`
and `worker` (the two sides of the worker processes), `hosting` (which processes), `binding` (the arguments of a
function), `model` (reward models).
The built-in functions, which `REWARDS` names: `exact_match`, `gsm8k`, `math`, `code`, `reasoning_gym`, `judge`
(two of them, which ask by `judge_client`). `extraction` finds the number that is the answer of a response, `formulas`
the formula; `answers` are those in words, and inequalities.
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
        "pairwise_judge": "hone.rewards.judge:PairwiseJudge",
        "reasoning_gym": Entry("hone.rewards.reasoning_gym:reasoning_gym", requires=("reasoning_gym",)),
    },
)
