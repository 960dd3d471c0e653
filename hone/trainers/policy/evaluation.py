"""Held-out evaluation: n answers to each prompt of named sets, reduced to mean@n, best@n, maj@n and pass@k, by role."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import regex

from hone.config import ConfigError
from hone.envs.episode import Play
from hone.tracking.hub import Tracking
from hone.trainers.policy.collection import Collector
from hone.trainers.policy.settings import PolicyEvaluationConfig
from hone.types import Prompt, Status, Trajectory, TrajectoryGroup

LOG = logging.getLogger("hone")
VOTE_S = 1.0  # a linear expression needs less than a millisecond for an answer
MOST_LATE = 10  # answers of one set; the others are not tried any more


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
        self._vote = config.vote_pattern if config is not None else ""
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
        """Figures of a set. With several roles, the names of each role's figures begin with the role."""
        figures: dict[str, float] = {}
        vote = Vote(self._vote)
        for role in sorted({one.role for group in groups for one in group.trainable}):
            found = reduce_role(groups, role, vote)
            figures |= {f"{role}/{key}" if role else key: value for key, value in found.items()}
        every = [one for group in groups for one in group.trajectories]
        figures["failed"] = float(sum(not one.status.trainable for one in every))
        return figures


class Vote:
    """Votes of the answers to one set: the last match of the user's expression, else the whole answer.

    A policy may write an answer on which an expression with nested repeats takes years. Such an answer has no vote.
    """

    def __init__(self, pattern: str = "") -> None:
        """`pattern` is an expression of the package regex, which has deadlines; empty: whole answers vote."""
        self._pattern = regex.compile(pattern) if pattern else None
        self._found: dict[str, str | None] = {}
        self._late = 0

    def of(self, response: str) -> str | None:
        """The vote of an answer; None if the expression took more than `VOTE_S` for it, or for `MOST_LATE` before."""
        if self._pattern is None:
            return response.strip()
        if response not in self._found:
            self._found[response] = self._searched(self._pattern, response)
        return self._found[response]

    def _searched(self, pattern: regex.Pattern[str], response: str) -> str | None:
        if self._late == MOST_LATE:
            return None
        matches: deque[regex.Match[str]] = deque(maxlen=1)
        try:
            matches.extend(pattern.finditer(response, timeout=VOTE_S, concurrent=True))
        except TimeoutError:
            self._late += 1
            rest = ", so no other answer of this set votes" if self._late == MOST_LATE else ""
            LOG.warning(
                "evaluation.vote_pattern takes more than %g s for an answer of %d characters, which has no vote%s; "
                "write an expression without repeats within repeats, such as (a+)+",
                VOTE_S, len(response), rest,
            )  # fmt: skip
            return None
        return str(matches[0][0]) if matches else response.strip()


WHOLE_ANSWER = Vote()


def reduce_role(groups: Sequence[TrajectoryGroup], role: str = "", vote: Vote = WHOLE_ANSWER) -> dict[str, float]:
    """The figures of one role: every component of its reward (`reduce_answers`), the reward, length, share cut off.

    Failed answers are left out. An episode counts once: its trajectories in this role are averaged.
    """
    played = [episode for group in groups for episode in _episodes(group, role)]
    figures: dict[str, float] = {}
    for name in sorted({name for episode in played for one in episode for name in one.components}):
        figures |= reduce_answers(groups, name, vote, role)
    if played:
        figures["reward"] = _mean([_mean([one.reward for one in episode]) for episode in played])
        figures["response_length"] = _mean([_mean([one.response_length for one in episode]) for episode in played])
        cut = [any(one.status is Status.TRUNCATED for one in episode) for episode in played]
        figures["truncated"] = _mean([float(one) for one in cut])
    return figures


def reduce_answers(
    groups: Sequence[TrajectoryGroup], component: str, vote: Vote = WHOLE_ANSWER, role: str = ""
) -> dict[str, float]:
    """One component over a set: its mean over all episodes, and with n > 1 episodes of a prompt mean@n, best@n, maj@n.

    A component that is always 0 or 1 has pass@k too, for the powers of two below n; best@n is pass@n then.
    An answer whose reward failed is left out. maj@n is the component of the most frequent answer to each prompt, 0 if
    none has a vote; ties go to the answer that came first. The answer of an episode with several trajectories is that
    of its last one.
    """
    scored: list[list[tuple[float, str]]] = []  # of each prompt: score and answer of each episode
    for group in groups:
        having = [[one for one in episode if component in one.components] for episode in _episodes(group, role)]
        found = [(_mean([one.components[component] for one in some]), some[-1].response) for some in having if some]
        if found:
            scored.append(found)
    if not scored:
        return {}
    mean = _mean([score for found in scored for score, _ in found])
    figures = {component: mean}
    n = max(len({one.episode for one in group.trajectories}) for group in groups)
    if n > 1:
        figures[f"{component}/mean@{n}"] = mean
        figures[f"{component}/best@{n}"] = _mean([max(score for score, _ in found) for found in scored])
        figures[f"{component}/maj@{n}"] = _mean([_majority(found, vote) for found in scored])
        if all(score in (0.0, 1.0) for found in scored for score, _ in found):
            rights = [(len(found), sum(score == 1.0 for score, _ in found)) for found in scored]
            for k in (2**power for power in range(1, n.bit_length()) if 2**power < n):
                figures[f"{component}/pass@{k}"] = _mean([pass_at(k, answers, right) for answers, right in rights])
    return figures


def pass_at(k: int, answers: int, right: int) -> float:
    """The chance that k of a prompt's answers, drawn without replacement, have a right one (arXiv:2107.03374).

    >>> pass_at(2, 4, 1)
    0.5
    """
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k) if k <= answers else float(right > 0)


def _episodes(group: TrajectoryGroup, role: str) -> list[list[Trajectory]]:
    """The trainable trajectories of a role, by episode."""
    found: dict[int, list[Trajectory]] = {}
    for one in group.trainable:
        if one.role == role:
            found.setdefault(one.episode, []).append(one)
    return list(found.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _majority(answers: Sequence[tuple[float, str]], vote: Vote) -> float:
    """The score of the most frequent answer; 0 if no answer has a vote."""
    votes = [vote.of(response) for _, response in answers]
    counted = Counter(one for one in votes if one is not None)
    if not counted:
        return 0.0
    return answers[votes.index(counted.most_common(1)[0][0])][0]
