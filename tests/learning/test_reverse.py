"""RL teaches a model from random weights, judged by exact match.

With log-probs or answers off by one position the mean reward still rises, but exact match does not.
"""

import json

import pytest

from hone.config import load
from hone.trainers.launch import run_policy
from hone.trainers.settings import PolicyRunConfig


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_grpo_reverses_three_characters_from_random_weights(tmp_path):
    overrides = [
        f"run.dir={tmp_path}",
        "runtime.threads=1",
        "tracking.trackers=[jsonl]",
        "tracking.rollouts_per_step=0",
    ]
    run_policy(load(PolicyRunConfig, "recipes/reverse/grpo.yaml", overrides))
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reached = {step["step"]: step["eval/held_out/exact_match"] for step in steps if "eval/held_out/exact_match" in step}
    assert reached[0] < 0.05, reached
    assert max(reached.values()) >= 0.99, reached
    assert steps[-1]["step"] == 400
