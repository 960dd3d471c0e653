"""Metrics of episodes with several turns or tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from hone.types import Called, Metric, Metrics, Trajectory, TrajectoryGroup, merge_metrics

NOT_RUN = {"broken": "broken", "unknown": "unknown", "refused": "refused"}  # fault -> metric: no tool was called


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
