"""Health of a run, from the metrics of its steps: a silent fault is a warning, or ends the run.

rewards that fail       an error, with the first cause     above reward.max_failed_fraction in 3 steps in a row
nothing to learn from   one line, with what to look at     after 10 such steps in a row
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hone.trainers.run.loop import NO_GRADIENT, Symptom, Symptoms, Values
from hone.types import Status, TrajectoryGroup

FAILED_STEPS = 3  # in a row, that end a run: an outage of one step does not


class RewardsFailed(RuntimeError):
    """Too many answers could not be scored, so what is trained on is not what was asked for."""


def symptoms(grouped: bool) -> list[Symptom]:
    """Return the symptoms to look for; `grouped`: each prompt has several answers, compared with each other."""
    found = [
        Symptom(
            lambda v: v["reward/max"] == v["reward/min"] == 0.0,
            "every answer had reward 0: read some of them with hone report, and score one by hand with hone score",
        ),
        Symptom(
            lambda v: v["rollout/truncated_fraction"] == 1.0,
            "every answer was cut at its length limit: raise rollout.sampling.max_response_tokens, or check that the "
            "chat template's end token is one that the model was trained to write",
        ),
        NO_GRADIENT,
    ]
    if grouped:
        alike = Symptom(
            lambda v: v["rollout/zero_variance_fraction"] == 1.0 and v["reward/max"] != 0.0,
            "all answers to a prompt had the same reward, so there was nothing to compare: the prompts may be too easy "
            "or too hard, or answers equal (rollout.sampling.temperature)",
        )
        found.append(alike)
    return found


class RunHealth:
    """Looks at each step's metrics, and tells `say` what the user should know."""

    def __init__(self, max_failed_fraction: float, grouped: bool, say: Callable[[str], None]) -> None:
        self._most = max_failed_fraction
        self._symptoms = Symptoms(symptoms(grouped), say)
        self._answers: deque[tuple[float, float]] = deque(maxlen=FAILED_STEPS)  # answers, and how many failed
        self._cause = ""

    def note(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Remember why the first of these answers could not be scored."""
        failed = (one for group in groups for one in group.trajectories if one.status is Status.REWARD_FAILED)
        if (first := next(failed, None)) is not None:
            self._cause = (
                f"{first.prompt_id} sample {first.sample}: {' '.join(first.error.split()) or 'no reason given'}"
            )

    def look(self, values: Values) -> None:
        """Look at one step's metrics. Raises RewardsFailed."""
        self._symptoms.look(values)
        if "rollout/trajectories" in values:
            failed = values.get(f"rollout/status/{Status.REWARD_FAILED}", 0.0)
            self._answers.append((values["rollout/trajectories"], failed))
            self._check_failed()

    def _check_failed(self) -> None:
        answers, failed = (sum(counts) for counts in zip(*self._answers, strict=True))
        if len(self._answers) == FAILED_STEPS and all(one > self._most * many for many, one in self._answers):
            raise RewardsFailed(
                f"{failed:.0f} of {answers:.0f} answers of the last {FAILED_STEPS} steps could not be scored, which is "
                f"more than reward.max_failed_fraction = {self._most} in each; {self._cause}"
            )
