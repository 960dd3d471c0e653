"""`hone check --baseline`: figures of the answers before training, and whether the task fits the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.trainers.policy.settings import PolicyRunConfig
from hone.types import Status, Trajectory, TrajectoryGroup

NEARLY = 0.99  # of the largest reward: counts as solved
CUT, EMPTY, MARKED = 0.5, 0.5, 0.3  # shares of answers above which something else than the task is wrong
HARD, EASY, SAMPLING = 0.1, 0.9, 0.3
_MARK = "<|"  # of chat templates


@dataclass(frozen=True, slots=True)
class Baseline:
    """Figures of a model before training; all but the last are shares."""

    greedy: float  # greedy answers that are right
    once: float  # sampled answers that are right: pass@1
    ever: float  # prompts with a right answer among their samples: pass@k
    mixed: float  # groups whose rewards differ: only these teach anything
    cut: float  # sampled answers that reached the limit
    empty: float
    marked: float  # sampled answers with marks of a chat template in their text
    samples: int  # k


def judged(greedy: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup], config: PolicyRunConfig) -> list[str]:
    """The figures in one line, and the verdict with what to change."""
    score = config.evaluation.score.rpartition("/")[2]
    full = sum(max(one.weight, 0.0) for one in config.reward.components.values()) or 1.0
    found = measured(greedy, sampled, score, full)
    line = (
        f"before training: greedy {found.greedy:.0%} right; sampled pass@1 {found.once:.0%}, pass@{found.samples} "
        f"{found.ever:.0%}; {found.mixed:.0%} of the groups have different rewards; {found.cut:.0%} of the answers are "
        "cut off"
    )
    lines = [line, f"verdict: {verdict(found)}"]
    if config.warm_start is not None:
        lines.append(
            f"note: these are answers of the model before warm_start, whose {config.warm_start.steps} supervised steps "
            "come before the first answer of the run"
        )
    return lines


def measured(
    greedy: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup], score: str, full: float
) -> Baseline:
    """The figures of answers. Right is a component `score` of 1, or without such a component the reward `full`."""

    def right(one: Trajectory) -> bool:
        if score in one.components:
            return one.components[score] >= NEARLY
        return one.reward >= NEARLY * full

    groups = [list(group.trainable) for group in sampled if group.trainable]
    answers = [one for group in groups for one in group]
    first = [one for group in greedy for one in group.trainable]
    return Baseline(
        greedy=_share([right(one) for one in first]),
        once=_share([right(one) for one in answers]),
        ever=_share([any(map(right, group)) for group in groups]),
        mixed=_share([len({round(one.reward, 6) for one in group}) > 1 for group in groups]),
        cut=_share([one.status == Status.TRUNCATED for one in answers]),
        empty=_share([not one.response.strip() for one in answers]),
        marked=_share([_MARK in one.response for one in answers]),
        samples=max((len(group) for group in groups), default=0),
    )


def verdict(found: Baseline) -> str:
    """The first obstacle to training that applies, and what to change."""
    if not found.samples:
        return "no answer could be scored; try the reward with `hone score`"
    if found.empty > EMPTY:
        return (
            f"template wrong: {found.empty:.0%} of the answers are empty; compare the first prompt with the model's own"
        )
    if found.marked > MARKED:
        return (
            f"template wrong: {found.marked:.0%} of the answers have marks of a chat template; the model does not know "
            "where its turn ends: set data.chat_template, or rollout.sampling.stop"
        )
    if found.cut >= NEARLY:
        return (
            "no answer ended before the limit: either it is too low, or the model never stops, as base models do; "
            "raise rollout.sampling.max_response_tokens, and if still none ends, set rollout.sampling.stop or "
            "fine-tune first (warm_start)"
        )
    if found.cut > CUT:
        return f"cut off: {found.cut:.0%} of the answers reach the limit; raise rollout.sampling.max_response_tokens"
    if found.mixed < HARD and found.ever < HARD:
        return (
            "too hard: hardly a group has different rewards; give partial credit in the reward, take easier rows or a "
            "larger model, or fine-tune on worked solutions first (warm_start)"
        )
    if found.once > EASY:
        return f"too easy: {found.once:.0%} of the sampled answers are right already; take harder rows"
    if found.greedy - found.once > SAMPLING:
        return (
            f"sampling loses much: greedy answers are right in {found.greedy:.0%}, sampled ones in {found.once:.0%}; "
            "lower rollout.sampling.temperature"
        )
    return f"it can learn: {found.mixed:.0%} of the groups have different rewards"


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0
