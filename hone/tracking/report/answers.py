"""Answers to the same held-out prompts before and after training: of the first and the last evaluation of a run.

They are the first prompts of a set, not chosen by their answers, so that they show what training did to any prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hone.tracking.base import TrackingError
from hone.tracking.trackers.jsonl import ROLLOUTS_FILE, rollout_lines

ON_PAGE = 12  # prompts of a set
_TRAINING = b'"set": null'
_KEYS = 200  # bytes at the start of a line that have it
_MOST_TEXT = 1_000  # characters of an answer
_ABOUT = (
    "the last message of the user",
    "the answer in the first evaluation of this set, and its reward",
    "the answer in the last evaluation of this set, and its reward",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of one evaluation; the reward is None if scoring failed."""

    text: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Beside:
    """Answers to prompts of one set by the first and the last evaluation of a run."""

    set: str
    steps: tuple[int, int]
    rows: tuple[tuple[str, Answer, Answer], ...]  # prompt, before, after


def read_beside(run_dir: Path, most: int) -> list[Beside]:
    """The answers to the first `most` prompts of each set; none if a run has not evaluated twice."""
    path = run_dir / ROLLOUTS_FILE
    return beside_of(rollout_lines(path) if path.is_file() else (), most)


def beside_of(lines: Iterable[bytes], most: int) -> list[Beside]:
    """The same from lines of `rollouts.jsonl.gz`, which may be those of the first and the last evaluation alone."""
    sets: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}  # set -> step -> prompt -> record
    try:
        for line in lines:
            if _TRAINING in line[:_KEYS]:
                continue
            record = json.loads(line)
            if not record.get("set") or record.get("sample") or record.get("role"):
                continue
            steps = sets.setdefault(record["set"], {})
            if len(steps) == 2 and record["step"] not in steps:  # keep the first and the newest
                del steps[max(steps)]
            steps.setdefault(record["step"], {}).setdefault(record["prompt_id"], record)
    except (TrackingError, ValueError, KeyError):  # a damaged file: the page says so where it lists rollouts
        pass
    found = []
    for name, steps in sets.items():
        if len(steps) == 2:
            first, last = min(steps), max(steps)
            both = [(one, steps[last][key]) for key, one in steps[first].items() if key in steps[last]]
            rows = ((_question(before), _answer(before), _answer(after)) for before, after in both[:most])
            if both:
                found.append(Beside(name, (first, last), tuple(rows)))
    return found


def beside_section(found: Iterable[Beside]) -> str:
    """The section of the page, as HTML; empty without two evaluations."""
    tables = []
    for one in found:
        heads = ("prompt", *titles(one))
        head = "".join(f'<th title="{about}">{escape(title)}</th>' for title, about in zip(heads, _ABOUT, strict=True))
        rows = "".join(
            f'<tr><td class="asked">{escape(prompt)}</td>{_cell(before)}{_cell(after)}</tr>'
            for prompt, before, after in one.rows
        )
        count = f'<span class="count">the first {len(one.rows)} prompts of {escape(one.set)}</span>'
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        tables.append(
            f'<details open id="beside"><summary><h2>Before and after</h2>{count}</summary>'
            f'<div class="panel beside">{table}</div></details>'
        )
    return f'<section class="charts">{"".join(tables)}</section>' if tables else ""


def titles(one: Beside) -> tuple[str, str]:
    """Headings of the two columns of answers."""
    first, last = one.steps
    return ("before training" if first == 0 else f"step {first}"), f"after step {last}"


def shown(answer: Answer) -> str:
    """An answer as text; an empty one is visible."""
    return answer.text.strip() or "(empty)"


def reward_of(answer: Answer) -> str:
    """The reward as text."""
    return "not scored" if answer.reward is None else f"{answer.reward:.3g}"


def _cell(answer: Answer) -> str:
    return f'<td>{escape(shown(answer))} <span class="badge" title="reward">{escape(reward_of(answer))}</span></td>'


def _question(record: dict[str, Any]) -> str:
    return _cut(str(record.get("question") or record["prompt"]))


def _answer(record: dict[str, Any]) -> Answer:
    reward = record.get("reward")
    return Answer(_cut(str(record.get("response", ""))), float(reward) if isinstance(reward, int | float) else None)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …"
