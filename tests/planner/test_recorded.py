"""Predictions against measured steps: two of the runs of benchmarks/asynchronous.py that docs/benchmarks.md describes.

Costs are those of the run at staleness 0, so the steps that are predicted have no part in them.
"""

import math

import pytest

from hone.planner.costs import Costs
from hone.planner.lengths import Lengths
from hone.planner.simulation import Setting, simulate


def geometric(mean, longest):
    """The lengths of a random policy, which ends an answer with the same probability after every token."""

    def draw(random):
        return min(1 + int(math.log(1 - random.random()) / math.log(1 - 1 / mean)), longest)

    return Lengths("geometric", draw)


BALANCED = Setting(
    Costs(0.00260, 0.0000653, 0.0000653, 0.000245, 0.0260, send_s=0.0186, reward_s=0.0054),
    geometric(77, 128),
    prompts_per_step=4,
    samples_per_prompt=8,
    prompt_tokens=6,
    steps=200,
)
RAGGED = Setting(
    Costs(0.00259, 0.0000595, 0.0000595, 0.000347, 0.0065, send_s=0.0176, reward_s=0.0022),
    geometric(81, 320),
    prompts_per_step=2,
    samples_per_prompt=4,
    prompt_tokens=6,
    steps=200,
)


@pytest.mark.parametrize(
    ("case", "staleness", "new_weights", "step_s", "age"),
    [
        (BALANCED, 0, "finish", 1.081, 0),
        (BALANCED, 1, "finish", 0.613, 1),
        (BALANCED, 2, "finish", 0.634, 2),
        (BALANCED, 2, "recompute", 0.634, 1.88),
        (RAGGED, 0, "finish", 0.806, 0),
        (RAGGED, 1, "finish", 0.588, 1),
        (RAGGED, 2, "finish", 0.565, 2),
        (RAGGED, 2, "recompute", 0.380, 1.66),
    ],
)
def test_a_prediction_is_near_the_measured_step(case, staleness, new_weights, step_s, age):
    fields = {name: getattr(case, name) for name in Setting.__dataclass_fields__}
    found = simulate(Setting(**{**fields, "staleness": staleness, "new_weights": new_weights}))
    assert 1 / found.steps_per_s == pytest.approx(step_s, rel=0.15)
    assert found.staleness == pytest.approx(age, abs=0.15)
