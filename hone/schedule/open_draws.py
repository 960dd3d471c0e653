"""Scored groups of open draws in a checkpoint: one line of JSON for each group, exact to the last bit.

Prompts are not written: the resumed prompt stream draws them again, with their images.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hone.full_disk import until_room
from hone.types import (
    Called,
    Metric,
    Prompt,
    Reducer,
    Status,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TurnSpan,
)

GROUPS = "groups.jsonl"
PLAIN = [one.name for one in fields(Trajectory) if one.name not in ("images", "routed_experts")]
TUPLES = ("token_ids", "loss_mask", "rollout_logprobs", "weight_versions")


def write_groups(folder: Path, groups: Iterable[TrajectoryGroup]) -> None:
    """Write groups into an existing folder."""
    until_room(partial(_write, folder / GROUPS, list(groups)))


def _write(path: Path, groups: Iterable[TrajectoryGroup]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for group in groups:
            greedy = None if group.greedy is None else _plain(group.greedy)
            line = {
                "draw": group.prompt.draw,
                "trajectories": [_plain(one) for one in group.trajectories],
                "greedy": greedy,
            }
            file.write(json.dumps(line) + "\n")


def read_groups(folder: Path, prompts: Mapping[int, Prompt]) -> dict[int, TrajectoryGroup]:
    """Draw -> its group; `prompts` has the prompt of each draw that was written."""
    found = {}
    for line in (folder / GROUPS).read_text(encoding="utf-8").splitlines():
        group = json.loads(line)
        prompt = prompts[group["draw"]]
        members = tuple(_trajectory(one, prompt) for one in group["trajectories"])
        greedy = None if group["greedy"] is None else _trajectory(group["greedy"], prompt)
        found[prompt.draw] = TrajectoryGroup(prompt, members, greedy)
    return found


def _plain(one: Trajectory) -> dict[str, Any]:
    plain = {name: getattr(one, name) for name in PLAIN}
    routes = one.routed_experts
    if routes is not None:
        plain["routed_experts"] = [list(routes.shape), base64.b64encode(routes.astype("<i2").tobytes()).decode()]
    return {
        **plain,
        "components": dict(one.components),
        "spans": [asdict(span) for span in one.spans],
        "metrics": {name: asdict(metric) for name, metric in one.metrics.items()},
    }


def _trajectory(plain: dict[str, Any], prompt: Prompt) -> Trajectory:
    found = {**plain, **{name: tuple(plain[name]) for name in TUPLES}}
    found["stop_reason"], found["status"] = StopReason(plain["stop_reason"]), Status(plain["status"])
    if "routed_experts" in plain:
        shape, data = plain["routed_experts"]
        found["routed_experts"] = np.frombuffer(base64.b64decode(data), "<i2").astype(np.int16).reshape(shape)
    found["spans"] = tuple(
        TurnSpan(**{**span, "calls": tuple(Called(**call) for call in span["calls"])}) for span in plain["spans"]
    )
    found["metrics"] = {
        name: Metric(**{**metric, "reducer": Reducer(metric["reducer"])}) for name, metric in plain["metrics"].items()
    }
    return Trajectory(**found, images=prompt.images)


__all__ = ["read_groups", "write_groups"]
