"""Metrics of a step's groups: rewards, lengths, statuses, and turns and tool calls where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

from hone.types import Called, Metric, Metrics, Status, Trajectory, TrajectoryGroup, merge_metrics

NOT_RUN = {"broken": "broken", "unknown": "unknown", "refused": "refused"}  # fault -> metric: no tool was called


def describe_greedy(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Metrics of the greedy answers, for algorithms that use them. Failed answers are left out of the means."""
    played = [group.greedy for group in groups if group.greedy is not None]
    if not played:
        return {}
    usable = [one for one in played if one.status.trainable]
    metrics: Metrics = {"rollout/greedy_failed": Metric.sum(len(played) - len(usable))}
    if usable:
        rewards, lengths = [one.reward for one in usable], [one.response_length for one in usable]
        metrics["rollout/greedy_reward"] = Metric.mean(sum(rewards) / len(usable), len(usable))
        metrics["rollout/greedy_response_length"] = Metric.mean(sum(lengths) / len(usable), len(usable))
    return metrics


def count_statuses(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Count a step's trajectories by status."""
    counts = Counter(one.status for group in groups for one in group.trajectories)
    return {f"rollout/status/{status}": Metric.sum(counts[status]) for status in Status}


def describe(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Rewards and lengths of a step's trajectories, before any is filtered out."""
    every = [one for group in groups for one in group.trajectories]
    usable = [one for one in every if one.status.trainable]
    metrics: Metrics = {"rollout/trajectories": Metric.sum(len(every))}
    if not usable:
        return metrics
    lengths, rewards, count = [one.response_length for one in usable], [one.reward for one in usable], len(usable)
    metrics |= {
        "reward/mean": Metric.mean(sum(rewards) / count, count),
        "reward/max": Metric.max(max(rewards)),
        "reward/min": Metric.min(min(rewards)),
        "rollout/response_length": Metric.mean(sum(lengths) / count, count),
        "rollout/response_length_max": Metric.max(max(lengths)),
        "rollout/truncated_fraction": Metric.mean(sum(one.status is Status.TRUNCATED for one in usable) / count, count),
        "rollout/zero_variance_fraction": Metric.mean(_zero_variance(groups), len(groups)),
    }
    names = sorted({name for one in usable for name in one.components})
    for name in names:
        found = [one.components[name] for one in usable if name in one.components]
        metrics[f"reward/{name}"] = Metric.mean(sum(found) / len(found), len(found))
    if len(parts := [name for name in names if "/" not in name]) > 1:
        metrics |= {f"rollout/reward_spread/{name}": _spread(groups, name) for name in parts}
    for role in sorted({one.role for one in usable} - {""}):
        found = [one.reward for one in usable if one.role == role]
        metrics[f"rollout/roles/{role}/trajectories"] = Metric.sum(len(found))
        metrics[f"rollout/roles/{role}/reward"] = Metric.mean(sum(found) / len(found), len(found))
    if any(len(one.spans) > 1 or one.metrics or any(span.calls for span in one.spans) for one in every):
        metrics |= describe_turns(groups)
    return metrics


def describe_lengths(drawn: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup]) -> Metrics:
    """Measure the lengths of a step's answers: all that were drawn, those that failed, those that are trained on.

    A trained distribution that is shorter than the drawn one means that deadlines or filters prefer short answers.
    """
    every = [one for group in drawn for one in group.trajectories]
    lengths = {
        "drawn": [one.response_length + one.unfinished_tokens for one in every],
        "failed": [one.response_length + one.unfinished_tokens for one in every if not one.status.trainable],
        "trained": [one.loss_tokens for group in kept for one in group.trainable if one.loss_tokens],
    }
    metrics: Metrics = {}
    for name, found in lengths.items():
        if found:
            ordered, count = sorted(found), len(found)
            metrics[f"rollout/{name}_length"] = Metric.mean(sum(found) / count, count)
            metrics[f"rollout/{name}_length_max"] = Metric.max(ordered[-1])
            for share in (50, 90):
                metrics[f"rollout/{name}_length_p{share}"] = Metric.mean(ordered[(count - 1) * share // 100], count)
    return metrics


def _spread(groups: Sequence[TrajectoryGroup], name: str) -> Metric:
    """The standard deviation of a component among the answers to a prompt, on average: what advantages are made of."""
    values = [[one.components[name] for one in group.trainable if name in one.components] for group in groups]
    return Metric.mean(fmean(pstdev(found) if len(found) > 1 else 0.0 for found in values), len(values))


def _zero_variance(groups: Sequence[TrajectoryGroup]) -> float:
    """The share of groups whose members all have the same reward: their group-relative advantages are 0."""
    alike = [all(len({one.reward for one in found}) <= 1 for found in group.compared.values()) for group in groups]
    return sum(alike) / len(groups)


def describe_turns(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Turns, observation tokens, tracks, tool calls by tool, and the figures of the environments.

    Failed trajectories count in the calls of tools, which often say why, and nowhere else.
    """
    every = [one for group in groups for one in group.trajectories]
    usable = [one for one in every if one.status.trainable]
    metrics: Metrics = {}
    if usable:
        count = len(usable)
        episodes = len({(i, one.episode) for i, group in enumerate(groups) for one in group.trainable})
        metrics["rollout/turns"] = Metric.mean(sum(one.turns for one in usable) / count, count)
        metrics["rollout/turns_max"] = Metric.max(max(one.turns for one in usable))
        metrics["rollout/observation_tokens"] = Metric.mean(sum(map(_observed, usable)) / count, count)
        metrics["rollout/tracks_per_episode"] = Metric.mean(count / episodes, episodes)
    calls = [_call_metrics(call) for one in every for span in one.spans for call in span.calls]
    own = [{f"rollout/{name}": metric for name, metric in one.metrics.items()} for one in every]
    return merge_metrics(metrics, *calls, *own)


def _observed(one: Trajectory) -> int:
    """Tokens after the prompt that the policy did not sample."""
    return len(one.token_ids) - one.prompt_length - one.response_length


def _call_metrics(call: Called) -> Metrics:
    """Figures of one call; a name that the policy made up is no metric."""
    if call.fault in NOT_RUN:
        return {f"rollout/calls/{NOT_RUN[call.fault]}": Metric.sum(1)}
    where = f"rollout/tools/{call.tool}"
    return {
        f"{where}/calls": Metric.sum(1),
        f"{where}/errors": Metric.sum(call.fault in ("error", "arguments")),
        f"{where}/timeouts": Metric.sum(call.fault == "timeout"),
        f"{where}/seconds": Metric.mean(call.seconds),
    }
