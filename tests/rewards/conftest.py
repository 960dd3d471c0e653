"""A rubric or pool that is closed when the test is over, and short ways to write groups."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hone.rewards.rubric import Rubric
from hone.rewards.settings import RewardConfig
from hone.types import Prompt, StopReason, Trajectory, TrajectoryGroup, TurnSpan

USER = Path(__file__).with_name("user_rewards.py")


@pytest.fixture
def user():
    """user("name") -> reference of a function in user_rewards.py."""
    return lambda name: f"{USER}:{name}"


@pytest.fixture
def group():
    """group(["answer", ...], ground_truth, **row) -> TrajectoryGroup."""

    def build(responses, ground_truth=None, **row):
        prompt = Prompt("set/0", (1,), ({"role": "user", "content": "?"},), ground_truth, "set", row)
        one = {"prompt_id": "set/0", "token_ids": (1, 2), "prompt_length": 1, "loss_mask": (0, 1)}
        one |= {"rollout_logprobs": (0.0, -1.0), "weight_versions": (-1, 0), "stop_reason": StopReason.STOP}
        one |= {"spans": (TurnSpan(1, 2),)}
        return TrajectoryGroup(prompt, tuple(Trajectory(sample=i, response=r, **one) for i, r in enumerate(responses)))

    return build


@asynccontextmanager
async def _started(components, workers):
    rubric = Rubric(RewardConfig(components=components, workers=workers))
    try:
        await rubric.start()
        yield rubric
    finally:
        await rubric.close()


@pytest.fixture
def score():
    """score(components, groups, workers=1) -> (scored groups, metrics as numbers)."""

    def run(components, groups, workers=1):
        async def all_of_them():
            async with _started(components, workers) as rubric:
                scored = await asyncio.gather(*(rubric.score(group) for group in groups))
                return scored, {name: metric.value for name, metric in rubric.metrics().items()}

        return asyncio.run(all_of_them())

    return run
