"""The contract of a reward function: it loads, it takes any answer, and it gives the same finite number each time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hone.rewards.rubric import Rubric
from hone.rewards.settings import RewardConfig
from hone.testing.contract import Absent, Contract, require
from hone.types import Prompt, StopReason, Trajectory, TrajectoryGroup, TurnSpan

COMPONENT = "reward"
ODD = (
    "",
    " ",
    "\n\n",
    "0",
    "-1e308",
    "nan",
    "naïve ☃",
    "\x00",
    "{}",
    "</think>",
    "<answer>",
    "\\boxed{",
    "[" * 2000,
    "x" * 200_000,
)
TOLERANCE = 1e-6

Case = tuple[str, Any, float]


class RewardContract(Contract):
    """Contract of `hone.rewards.base`, in a worker process as in a run.

    `cases` are (response, ground truth, expected reward). Rewards are cheap to be wrong about, so give some that are
    right, some that are wrong, and what a policy writes to cheat.
    """

    cases: ClassVar[Sequence[Case]] = ()
    options: ClassVar[Mapping[str, Any]] = {}
    row: ClassVar[Mapping[str, Any]] = {}  # other columns of the data
    timeout_s: ClassVar[float] = 10.0  # of one call

    _first: ClassVar[list[Trajectory] | None] = None  # of `cases`, then of the odd answers

    @classmethod
    def teardown_class(cls) -> None:
        cls._first = None

    def make(self) -> str:
        """Return the reward's registered name, or "package.module:name"."""
        raise NotImplementedError

    def test_the_cases_have_their_rewards(self) -> None:
        """Each of `cases` has its expected reward."""
        if not self.cases:
            raise Absent("the suite has no cases")
        for (response, truth, expected), scored in zip(self.cases, self._at_first(), strict=False):
            place = f"the answer {response!r:.80} to {truth!r:.80}"
            require(scored.status.trainable, f"{place} failed: {scored.error}")
            require(
                abs(scored.reward - expected) <= TOLERANCE, f"{place} is worth {scored.reward}, expected {expected}"
            )

    def test_the_same_answer_is_worth_the_same(self) -> None:
        """Scored in another order, beside other answers and by another process, an answer has the same reward."""
        if not self.cases:
            raise Absent("the suite has no cases")
        again = list(reversed(self._scored([*reversed(self.cases)])))
        for (response, _, _), one, two in zip(self.cases, self._at_first(), again, strict=False):
            require(one.reward == two.reward, f"{response!r:.80} was worth {one.reward} first, and {two.reward} later")

    def test_odd_answers_have_a_reward(self) -> None:
        """Whatever the policy writes, it gets a finite number in time: an exception would waste the episode."""
        for text, scored in zip(ODD, self._at_first()[len(self.cases) :], strict=True):
            require(scored.status.trainable, f"the answer {text!r:.80} failed: {scored.error}")

    def _at_first(self) -> list[Trajectory]:
        """The cases and the odd answers, scored once for all checks of the class."""
        cls = type(self)
        if cls.__dict__.get("_first") is None:
            truth = self.cases[0][1] if self.cases else None
            cls._first = self._scored([*self.cases, *((text, truth, 0.0) for text in ODD)])
        assert cls._first is not None
        return cls._first

    def _scored(self, cases: Sequence[Case]) -> list[Trajectory]:
        """Score each answer as a group of its own, in worker processes that end afterwards."""
        part = {"reward": self.make(), "options": dict(self.options), "timeout_s": self.timeout_s}
        config = RewardConfig.model_validate({"components": {COMPONENT: part}, "workers": 1})

        async def score() -> list[Trajectory]:
            rubric = Rubric(config)
            try:
                await rubric.start()
                groups = [self._group(number, response, truth) for number, (response, truth, _) in enumerate(cases)]
                scored = await asyncio.gather(*(rubric.score(group) for group in groups))
                return [group.trajectories[0] for group in scored]
            finally:
                await rubric.close()

        return self.wait(score())

    def _group(self, number: int, response: str, truth: Any) -> TrajectoryGroup:
        """One answer to one prompt; of its tokens, a reward sees none."""
        name = f"contract/{number}"
        prompt = Prompt(name, (1,), ({"role": "user", "content": "?"},), truth, "contract", dict(self.row))
        one = Trajectory(
            prompt_id=name,
            sample=0,
            token_ids=(1, 2),
            prompt_length=1,
            loss_mask=(0, 1),
            rollout_logprobs=(0.0, -1.0),
            weight_versions=(-1, 0),
            response=response,
            stop_reason=StopReason.STOP,
            spans=(TurnSpan(1, 2),),
        )
        return TrajectoryGroup(prompt, (one,))
