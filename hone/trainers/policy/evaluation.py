"""Held-out evaluation: n answers to each prompt of named sets, reduced to mean@n, best@n and maj@n."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hone.config import ConfigError
from hone.envs.episode import Play
from hone.tracking.hub import Tracking
from hone.trainers.policy.collection import Collector
from hone.trainers.policy.settings import PolicyEvaluationConfig
from hone.types import Prompt, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A held-out set, read once: the same prompts in the same order at every evaluation."""

    name: str
    prompts: tuple[Prompt, ...]


class Evaluator:
    """Generates answers to every set with the current rollout weights, and reduces their rewards to metrics."""

    def __init__(
        self,
        sets: Sequence[EvaluationSet],
        collector: Collector,
        play: Play,
        tracking: Tracking,
        config: PolicyEvaluationConfig | None = None,
    ) -> None:
        """Without `config` there are no sets, and no evaluation is ever due."""
        self._sets = sets
        self._every = config.every_steps if config is not None else 0
        self._score_key = config.score if config is not None else ""
        self._vote = re.compile(config.vote_pattern) if config is not None and config.vote_pattern else None
        self._collector = collector
        self._play = play
        self._tracking = tracking

    def due(self, step: int, last: int) -> bool:
        """Before training, after it, and every so many steps between."""
        return bool(self._sets) and (step in (0, last) or (self._every > 0 and step % self._every == 0))

    def run(self, step: int, versions: tuple[int, int] | None = None) -> dict[str, float]:
        """Metrics named `eval/<set>/...`, of answers from weights within `versions`; None: any.

        Every evaluation uses the same seeds, so only the policy changes.
        """
        figures: dict[str, float] = {}
        for one in self._sets:
            groups = self._collector.collect(one.prompts, self._play, versions)
            self._collector.metrics()  # so that the next step does not report them
            self._tracking.evaluated(step, one.name, groups)
            figures |= {f"eval/{one.name}/{key}": value for key, value in self._reduce(groups).items()}
        return figures

    def score(self, figures: Mapping[str, float]) -> float | None:
        """The metric that chooses the best checkpoint. Raises ConfigError if there is no metric of that name."""
        if not figures:
            return None
        if not self._score_key:
            return next((value for name, value in figures.items() if not name.endswith("/failed")), None)
        if self._score_key not in figures:
            raise ConfigError(f"evaluation.score: no metric {self._score_key!r} (there is: {', '.join(figures)})")
        return figures[self._score_key]

    def _reduce(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        names = sorted({name for group in groups for one in group.trainable for name in one.components})
        figures: dict[str, float] = {}
        for name in names:
            figures |= reduce_answers(groups, name, self._vote)
        every = [one for group in groups for one in group.trajectories]
        usable = [one for one in every if one.status.trainable]
        figures["failed"] = float(len(every) - len(usable))
        if usable:
            figures["reward"] = sum(one.reward for one in usable) / len(usable)
            figures["response_length"] = sum(one.response_length for one in usable) / len(usable)
        return figures


def reduce_answers(
    groups: Sequence[TrajectoryGroup], component: str, vote: re.Pattern[str] | None = None
) -> dict[str, float]:
    """One component over a set: its mean over all answers, and with n > 1 answers to a prompt mean@n, best@n, maj@n.

    An answer whose reward failed is left out. maj@n is the component of the most frequent
    answer of each prompt; ties go to the answer that came first.
    """
    scored = [[one for one in group.trainable if component in one.components] for group in groups]
    scored = [answers for answers in scored if answers]
    every = [one.components[component] for answers in scored for one in answers]
    if not every:
        return {}
    mean = sum(every) / len(every)
    figures = {component: mean}
    n = max(len(group.trajectories) for group in groups)
    if n > 1:
        best = [max(one.components[component] for one in answers) for answers in scored]
        majority = [_majority(answers, vote).components[component] for answers in scored]
        figures[f"{component}/mean@{n}"] = mean
        figures[f"{component}/best@{n}"] = sum(best) / len(best)
        figures[f"{component}/maj@{n}"] = sum(majority) / len(majority)
    return figures


def _majority(answers: Sequence[Trajectory], vote: re.Pattern[str] | None) -> Trajectory:
    votes = [_vote_of(one.response, vote) for one in answers]
    winner = Counter(votes).most_common(1)[0][0]
    return answers[votes.index(winner)]


def _vote_of(response: str, vote: re.Pattern[str] | None) -> str:
    found = [match.group(0) for match in vote.finditer(response)] if vote else []
    return found[-1] if found else response.strip()
