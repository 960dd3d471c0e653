"""Held-out evaluation: n answers to each prompt of named sets, reduced to mean@n, best@n and maj@n."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hone.config import ConfigError
from hone.envs.episode import Play
from hone.tracking.hub import Tracking
from hone.trainers.playing import Player
from hone.trainers.settings import EvaluationConfig
from hone.types import Prompt, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A held-out set, read once: the same prompts in the same order at every evaluation."""

    name: str
    prompts: tuple[Prompt, ...]


class Evaluator:
    """Answers every set with the weights that the rollout engine serves, and says how good the answers are."""

    def __init__(
        self, config: EvaluationConfig, sets: Sequence[EvaluationSet], player: Player, play: Play, tracking: Tracking
    ) -> None:
        self._sets = sets
        self._every = config.every_steps
        self._score_key = config.score
        self._vote = re.compile(config.vote_pattern) if config.vote_pattern else None
        self._player = player
        self._play = play
        self._tracking = tracking

    def due(self, step: int, last: int) -> bool:
        """Before training, after it, and every so many steps between."""
        return bool(self._sets) and (step in (0, last) or (self._every > 0 and step % self._every == 0))

    def run(self, step: int) -> dict[str, float]:
        """Figures under `eval/<set>/`. Seeds do not depend on the step: what changes is the policy."""
        figures: dict[str, float] = {}
        for one in self._sets:
            groups = self._player.play(one.prompts, self._play)
            self._player.metrics()  # what an evaluation counts is not the step's
            self._tracking.evaluated(step, one.name, groups)
            figures |= {f"eval/{one.name}/{key}": value for key, value in self._reduce(groups).items()}
        return figures

    def score(self, figures: Mapping[str, float]) -> float | None:
        """The figure that checkpoints are compared by. Raises ConfigError if it names none."""
        if not figures:
            return None
        if not self._score_key:
            return next((value for name, value in figures.items() if not name.endswith("/failed")), None)
        if self._score_key not in figures:
            raise ConfigError(f"evaluation.score: no figure {self._score_key!r} (there is: {', '.join(figures)})")
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

    An answer that could not be judged (a failed reward) counts in nothing. maj@n is the component of the most frequent
    answer of each prompt; among equals, the one that was given first.
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
