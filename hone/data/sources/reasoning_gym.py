"""The reasoning-gym package as a source: problems made on demand, each row from a separate random generator.

`score` is for the reward and the environment of this name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hone.data.settings import ReasoningGymSettings, RowsConfig
from hone.data.sources.base import DataError, Row
from hone.data.sources.reasoning_gym_patches import as_made, load_package
from hone.registry import unknown


class TaskRows:
    """A task's problems. The package's verifier scores an answer by the columns `task` and `entry`."""

    blocks = None
    fills_gaps = False
    columns: Mapping[str, str] = {
        "prompt": "question",
        "ground_truth": "answer",
        "completion": "answer",
        "data_source": "task",
    }

    def __init__(self, problems: Any, task: str) -> None:
        self._problems = problems
        self._task = task
        self.place = f"reasoning_gym task {task}"

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.place} has problems 0 to {len(self) - 1}, found {index}")
        entry = self._problems[index]
        return {**entry, "entry": entry, "task": self._task}

    def where(self, index: int) -> str:
        return f"{self.place} row {index}"

    def folder(self, index: int) -> Path:
        return Path()


def open_task(config: RowsConfig) -> TaskRows:
    """Open the problems of one task. Raises DataError for an unknown task or option, with the nearest valid name."""
    settings = config.source
    assert isinstance(settings, ReasoningGymSettings)
    try:
        factory = load_package().factory
    except ImportError as error:
        raise DataError(f"source reasoning_gym needs the package reasoning-gym: {error}") from error
    task = settings.task
    if task not in factory.DATASETS:
        raise DataError(unknown("reasoning_gym task", task, list(factory.DATASETS)))
    known = [
        field.name for field in dataclasses.fields(factory.DATASETS[task][1]) if field.name not in ("seed", "size")
    ]
    for option in settings.options:
        if option not in known:
            raise DataError(unknown(f"option of reasoning_gym task {task}", option, known))
    try:
        problems = factory.create_dataset(task, seed=settings.seed, size=settings.size, **settings.options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym task {task} refuses its options {settings.options}: {error}") from error
    return TaskRows(problems, task)


def score(answer: str | None, row: Mapping[str, Any]) -> float:
    """The score of an answer by the task's verifier, usually 0.0 or 1.0; some tasks give partial scores.

    An answer that the verifier cannot read scores 0.0: some tasks raise for it, such as that of
    `prime_factorization` for words. If it raises for the row's own answer too, that error is raised.

    The row has `task` and `entry`, as this source writes them, or is an entry itself (`question`, `answer`, `metadata`
    with `source_dataset`). Raises ValueError for any other row.
    """
    task, entry = _problem(row)
    verify, problem = _verifier(task), as_made(task, entry)
    try:
        return float(verify(None if answer is None else answer.strip(), problem))
    except Exception:  # noqa: BLE001  the package's code; whatever it raises, the next line tells whose fault it is
        verify(entry["answer"], problem)
        return 0.0


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
    package = load_package()
    if task not in package.factory.DATASETS:
        raise ValueError(unknown("Reasoning Gym task", task, list(package.factory.DATASETS)))
    verifier: Callable[[str | None, Mapping[str, Any]], float] = package.get_score_answer_fn(task)
    return verifier
