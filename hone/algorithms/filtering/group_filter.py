"""`GroupFilter`: shapes the rewards of collected groups, and decides which groups and prompts are trained on.

The functions below it work on trajectories alone, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hone.algorithms.filtering.history import PromptHistory, without_variance
from hone.algorithms.filtering.overlong import check_buffer, punish_overlong
from hone.algorithms.filtering.settings import OVERLONG, DynamicSamplingSettings
from hone.algorithms.settings import AlgorithmConfig
from hone.registry import unknown
from hone.types import Metrics, Status, Trajectory, TrajectoryGroup

GREEDY_REWARD = "greedy_reward"  # of Trajectory.components: the reward of the greedy answer to the same prompt


class Dropped(NamedTuple):
    """A group that is not trained on, and why; none of its trajectories is trainable any more.

    Their status is now `filtered`, or the status of the greedy answer that failed.
    """

    group: TrajectoryGroup
    reason: str


class GroupFilter:
    """The part of an algorithm that works on groups of trajectories, before they are packed into a batch.

    Raises ValueError if there is an overlong penalty without `max_response_tokens`, or with a buffer longer than it.
    """

    def __init__(self, config: AlgorithmConfig, max_response_tokens: int | None) -> None:
        overlong = config.overlong
        self._mask_truncated = overlong is not None and overlong.mask
        self._overlong = overlong if overlong is not None and overlong.punishes else None
        if self._overlong is not None:
            if max_response_tokens is None:
                raise ValueError("algorithm.overlong needs to know the longest response: pass max_response_tokens")
            check_buffer(max_response_tokens, self._overlong)
        self._sampling = config.dynamic_sampling
        self._max_response_tokens = max_response_tokens or 0
        self._compares = config.advantage.compares_group
        required = config.advantage.required_fields
        named = {name.removeprefix("components.") for name in required if name.startswith("components.")}
        self._components = sorted(named - {GREEDY_REWARD, OVERLONG})
        skipping = None if config.dynamic_sampling is None else config.dynamic_sampling.skip_zero_variance
        self._history = PromptHistory(skipping) if skipping is not None else None

    @property
    def max_draws(self) -> int:
        """Return the number of times that a step may draw prompts to replace dropped groups."""
        return self._sampling.max_draws if self._sampling is not None else 1

    def prompts_for(self, missing: int) -> int:
        """Return the number of prompts to draw for `missing` groups: more with `dynamic_sampling.oversample`."""
        return missing if self._sampling is None else math.ceil(missing * self._sampling.oversample)

    @property
    def oversamples(self) -> bool:
        """Return whether more prompts are drawn than groups are needed."""
        return self._sampling is not None and self._sampling.oversample > 1

    @property
    def skips_prompts(self) -> bool:
        """Return whether prompts may be skipped before rollout."""
        return self._history is not None

    def skip_probability(self, prompt_id: str) -> float:
        """Probability that this prompt is skipped before rollout, because its last groups had no variance."""
        return self._history.skip_probability(prompt_id) if self._history is not None else 0.0

    def shape(self, groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Add the overlong penalty, if there is one, to the rewards."""
        if self._overlong is None:
            return list(groups)
        return punish_overlong(groups, self._max_response_tokens, self._overlong)

    def keeps(self, group: TrajectoryGroup) -> bool:
        """Return whether `keep` would keep this group as it was scored, before `shape`; changes nothing.

        Raises ValueError for a trajectory without the metric of dynamic sampling.
        """
        return bool(self._split(self.shape([group]))[0])

    def keep(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[Dropped]]:
        """Split into the groups to train on, and (group marked as not trainable, reason); updates the prompt history.

        Raises ValueError for a trainable trajectory without a reward component that the estimator reads.
        """
        kept, dropped = self.sort(groups)
        if self._history is not None and self._sampling is not None:
            metric = self._sampling.metric
            # a failure says nothing of its prompt
            whole = [group for group in groups if len(group.trainable) == len(group.trajectories) > 1]
            self._history.observe((one.prompt.prompt_id, _most_varied(one, metric)) for one in whole)
        return kept, dropped

    def sort(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[Dropped]]:
        """Return or raise as `keep` does, without a change."""
        require_components(groups, self._components)
        kept, dropped = self._split(groups)
        return [with_greedy_reward(group) for group in kept], dropped

    def _split(self, groups: Iterable[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[Dropped]]:
        return split_trainable(groups, self._sampling, self._compares, self._mask_truncated)

    def measure(self) -> Metrics:
        """Metrics of the prompt history; empty without one."""
        return self._history.metrics() if self._history is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible; empty without a prompt history."""
        return {"prompts": self._history.state_dict()} if self._history is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._history is not None and "prompts" in state:  # absent where skipping was not on before
            self._history.load_state_dict(state["prompts"])


def with_greedy_reward(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with the reward of its greedy answer among the components of its trainable trajectories."""
    if group.greedy is None:
        return group
    reward = group.greedy.reward
    noted = (
        one.with_(components={**one.components, GREEDY_REWARD: reward}) if one.status.trainable else one
        for one in group.trajectories
    )
    return replace(group, trajectories=tuple(noted))


def require_components(groups: Iterable[TrajectoryGroup], names: Sequence[str]) -> None:
    """Raise ValueError naming the first trainable trajectory whose reward lacks one of these components."""
    for group in groups:
        for one in group.trainable:
            missing = [name for name in names if name not in one.components]
            if missing:
                raise ValueError(
                    f"prompt {one.prompt_id}, sample {one.sample}: the reward has no component {missing[0]!r} "
                    f"(it has: {', '.join(sorted(one.components)) or 'none'}), and algorithm.advantage reads it in "
                    "every answer; give it in every answer, or remove it from algorithm.advantage"
                )


def split_trainable(
    groups: Iterable[TrajectoryGroup],
    settings: DynamicSamplingSettings | None,
    compares_group: bool = True,
    mask_truncated: bool = False,
) -> tuple[list[TrajectoryGroup], list[Dropped]]:
    """Sort groups into those to train on and those dropped, each of the latter with its reason.

    A group is dropped if none of its trajectories has a token to train on, or if its greedy answer failed: it has no
    baseline. With `compares_group` also if failures left one episode of several, or if no role has two episodes; a role
    with one episode is filtered out of its group. With dynamic sampling also if in each role the metric is the same for
    all trainable trajectories (arXiv 2503.14476, section 3.2). With `mask_truncated`, truncated trajectories are
    masked: they keep their reward and get no loss (overlong filtering, section 3.4 there). Order is kept.
    Raises ValueError if a trajectory lacks the metric.
    """
    kept: list[TrajectoryGroup] = []
    dropped: list[Dropped] = []
    for group in groups:
        whole = without_lone_roles(group) if compares_group else group
        masked = with_truncated_masked(whole) if mask_truncated else whole
        reason = _reason(group, masked, settings, compares_group)
        if reason:
            dropped.append(Dropped(_marked(group, reason), reason))
        else:
            kept.append(masked)
    return kept, dropped


def without_lone_roles(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group without trajectories of a role that only one of its episodes has: nothing can be compared with them."""
    episodes = {role: {one.episode for one in found} for role, found in group.compared.items()}
    lone = {role for role, found in episodes.items() if role and len(found) == 1}
    if not lone or len({one.episode for one in group.trajectories}) == 1:
        return group
    trajectories = (
        one.with_(status=Status.FILTERED, error=f"no other episode of this prompt has the role {one.role}")
        if one.role in lone and one.status.trainable
        else one
        for one in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def with_truncated_masked(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with its truncated trajectories masked: they count in the baseline and get no loss."""
    trajectories = (one.with_(masked=True) if one.status is Status.TRUNCATED else one for one in group.trajectories)
    return replace(group, trajectories=tuple(trajectories))


def _reason(
    group: TrajectoryGroup, masked: TrajectoryGroup, settings: DynamicSamplingSettings | None, compares_group: bool
) -> str:
    if not group.trainable:
        return "no trainable trajectory: " + _statuses(group.trajectories)
    if not any(one.response_length for one in group.trainable):
        return "no trainable trajectory has a generated token"
    left, episodes = (len({one.episode for one in some}) for some in (group.trainable, group.trajectories))
    if compares_group and left == 1 < episodes:
        return f"one of {episodes} trajectories is left to compare with: " + _statuses(group.trajectories)
    if not masked.trainable:
        return f"no role was played in two of the {left} episodes that are left: {', '.join(group.compared)}"
    if not any(one.loss_tokens for one in masked.trainable):
        return "every trainable trajectory is truncated, and algorithm.overlong.mask is on"
    if group.greedy is not None and not group.greedy.status.trainable:
        return f"the greedy answer failed: {group.greedy.status}"
    if settings is None:
        return ""
    values = {role: [metric_of(one, settings.metric) for one in found] for role, found in group.compared.items()}
    if not all(map(without_variance, values.values())):
        return ""
    return "; ".join(
        f"{settings.metric} is {found[0]:g} for all {len(found)} trajectories{f' of the role {role}' if role else ''}"
        for role, found in values.items()
    )


def metric_of(trajectory: Trajectory, metric: str) -> float:
    """The reward before any overlong penalty, or the named component. Raises ValueError with the nearest name.

    The penalty is left out: among wrong answers it would only reward the shorter ones.
    """
    if metric == "reward":
        return trajectory.reward - trajectory.components.get(OVERLONG, 0.0)
    if metric not in trajectory.components:
        known = ["reward", *trajectory.components]
        raise ValueError(f"prompt {trajectory.prompt_id}: {unknown('dynamic_sampling.metric', metric, known)}")
    return trajectory.components[metric]


def _most_varied(group: TrajectoryGroup, metric: str) -> list[float]:
    """The metric of the trajectories in the role in which it differs most."""
    values = [[metric_of(one, metric) for one in found] for found in group.compared.values()]
    return max(values, key=lambda found: max(found) - min(found))


def _statuses(trajectories: Sequence[Trajectory]) -> str:
    seen = sorted({str(one.status) for one in trajectories})
    return ", ".join(f"{sum(one.status == s for one in trajectories)} {s}" for s in seen) or "the group is empty"


def lost_to_failures(group: TrajectoryGroup) -> bool:
    """Return whether failures left a dropped group no episode, or one that has nothing to be compared with."""
    left = {one.episode for one in group.trajectories if one.status is Status.FILTERED}
    return len(left) <= 1 and any(one.episode not in left for one in group.trajectories)


def _marked(group: TrajectoryGroup, reason: str) -> TrajectoryGroup:
    """Failures keep their own status: filtering must not hide them. A failed greedy answer is its group's failure."""
    status, error = Status.FILTERED, reason
    if group.greedy is not None and not group.greedy.status.trainable:
        status, error = group.greedy.status, f"{reason}: {group.greedy.error}"
    marked = (one.with_(status=status, error=error) if one.status.trainable else one for one in group.trajectories)
    return replace(group, trajectories=tuple(marked))
