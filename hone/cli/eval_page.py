"""The page of `hone eval --beside --page`: answers of two models to the same held-out prompts, changed ones first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hone.types import TrajectoryGroup

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; table-layout: fixed }
th, td { border: 1px solid #8886; padding: .5rem .7rem; text-align: left; vertical-align: top }
td { white-space: pre-wrap; overflow-wrap: anywhere }
th:first-child { width: 28% }
b { display: block } .better { color: light-dark(#116329, #57c06a) } .worse { color: light-dark(#a40e26, #ff8b8b) }
"""


def write_page(
    path: Path, names: tuple[str, str], answers: tuple[Sequence[TrajectoryGroup], Sequence[TrajectoryGroup]]
) -> None:
    """Write both models' first answers to each prompt, the largest change of the reward first."""
    ours, theirs = ({group.prompt.prompt_id: group for group in some} for some in answers)
    pairs = [(ours[name], theirs[name]) for name in ours if name in theirs]  # a tokenizer may make a prompt too long
    rows = sorted(pairs, key=lambda pair: _change(*pair))
    better = sum(reward(one) > reward(other) for one, other in pairs)
    worse = sum(reward(one) < reward(other) for one, other in pairs)
    said = f"{len(pairs)} prompts: {names[0]} has a higher reward at {better}, a lower one at {worse}."
    head = "".join(f"<th>{escape(one)}</th>" for one in ("prompt", *names))
    body = "".join(_row(*pair) for pair in rows)
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(names[0])} beside {escape(names[1])}</title>"
        f"<style>{STYLE}</style><h1>Answers to held-out prompts</h1><p>{escape(said)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>\n",
        encoding="utf-8",
        errors="xmlcharrefreplace",
    )


def reward(group: TrajectoryGroup) -> float:
    """The reward of the first answer; one that was not scored is below every other."""
    first = group.trajectories[0]
    return first.reward if first.status.trainable else float("-inf")


def reward_text(group: TrajectoryGroup) -> str:
    """The reward of the first answer with its components, or why there is none."""
    first = group.trajectories[0]
    if not first.status.trainable:
        return f"not scored ({first.status}{f': {first.error}' if first.error else ''})"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in first.components.items())
    return f"reward {first.reward:.3g}{f' ({parts})' if len(first.components) > 1 else ''}"


def question(group: TrajectoryGroup) -> str:
    """The last message of the user."""
    asked = next((one for one in reversed(group.prompt.messages) if one["role"] == "user"), None)
    return "" if asked is None else str(asked["content"])


def _change(one: TrajectoryGroup, other: TrajectoryGroup) -> tuple[float, bool, str]:
    first, second = reward(one), reward(other)
    change = 0.0 if first == second else abs(first - second)
    same = one.trajectories[0].response.strip() == other.trajectories[0].response.strip()
    return -change, same, one.prompt.prompt_id


def _row(one: TrajectoryGroup, other: TrajectoryGroup) -> str:
    better, worse = ("better", "worse") if reward(one) > reward(other) else ("worse", "better")
    marks = ("", "") if reward(one) == reward(other) else (better, worse)
    cells = "".join(
        f'<td><b class="{mark}">{escape(reward_text(group))}</b>'
        f"{escape(group.trajectories[0].response.strip() or '(empty)')}</td>"
        for group, mark in zip((one, other), marks, strict=True)
    )
    return f"<tr><td>{escape(question(one))}</td>{cells}</tr>"
