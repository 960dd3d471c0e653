"""Reasoning Gym: score an answer with its task's verifier (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.data.answers import between_tags
from hone.data.sources.reasoning_gym import score
from hone.data.sources.reasoning_gym_patches import load_package

load_package()  # now, because it takes seconds: no answer pays for it


def reasoning_gym(response: str, row: Mapping[str, Any], tag: str = "") -> float:
    """The score of the answer by the task's verifier, usually 0.0 or 1.0; some tasks give partial scores.

    The row has `task` and `entry`, as the data source `reasoning_gym` writes them, or is an entry itself (`question`,
    `answer`, `metadata` with `source_dataset`). `tag`: the answer is the text between the last <tag> and </tag>;
    without them the verifier gets no answer.
    """
    return score(between_tags(response, tag) if tag else response, row)
