"""Reasoning Gym: score an answer with its task's verifier (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hone.data.sources.reasoning_gym_patches import load_package
from hone.registry import unknown
from hone.rewards.extraction import between_tags

PACKAGE = load_package()


def reasoning_gym(response: str, row: Mapping[str, Any], tag: str = "") -> float:
    """The score of the answer by the task's verifier, usually 0.0 or 1.0; some tasks give partial scores.

    The row has `task` and `entry`, as the data source `reasoning_gym` writes them, or is an entry itself (`question`,
    `answer`, `metadata` with `source_dataset`). `tag`: the answer is the text between the last <tag> and </tag>;
    without them the verifier gets no answer.
    """
    task, entry = _problem(row)
    answer = between_tags(response, tag) if tag else response
    return float(_verifier(task)(None if answer is None else answer.strip(), entry))


def _problem(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    stored = row.get("entry")
    entry = stored if isinstance(stored, Mapping) else row
    metadata = entry.get("metadata")
    task = row.get("task") or (metadata.get("source_dataset") if isinstance(metadata, Mapping) else None)
    if not isinstance(task, str) or "answer" not in entry:
        raise ValueError(
            "the row is not a Reasoning Gym problem: expected columns 'task' and 'entry', or 'question', 'answer' and "
            f"'metadata' with 'source_dataset'; found {', '.join(row)}"
        )
    return task, entry


@functools.cache
def _verifier(task: str) -> Callable[[str | None, Mapping[str, Any]], float]:
    if task not in PACKAGE.factory.DATASETS:
        raise ValueError(unknown("Reasoning Gym task", task, list(PACKAGE.factory.DATASETS)))
    verifier: Callable[[str | None, Mapping[str, Any]], float] = PACKAGE.get_score_answer_fn(task)
    return verifier
