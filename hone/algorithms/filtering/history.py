"""Prompts that are skipped before rollout because their last groups taught nothing: GRESO, arXiv 2506.02177.

A prompt whose last z groups all had no variance is skipped with probability 1 - max(explore^z, 0.01). There are two
values of `explore`: for easy prompts (the metric was above 0 in all answers) and for hard ones. After each collected
batch either moves by `explore_step`, within 0.05 and 0.95: down while the share of its kind in the batch has reached
the target, else up. They do not move until a prompt comes back for the first time, because before that they had no
effect.
The constants come from the authors' code, github.com/Infini-AI-Lab/GRESO (`ray_trainer.py`,
`presampling_selector.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hone.algorithms.filtering.settings import SkipZeroVarianceSettings
from hone.types import Metric, Metrics

SKIPPED = "skipped before rollout: expected to have no variance"
EASY, HARD = "easy", "hard"
LEAST_CHANCE = 0.01  # to play a prompt, however long it has taught nothing
LOWEST, HIGHEST = 0.05, 0.95  # between which `explore` moves


class PromptHistory:
    """Number of a prompt's last groups in a row without variance, and whether they were easy or hard."""

    def __init__(self, settings: SkipZeroVarianceSettings) -> None:
        self._step = settings.explore_step
        moves = self._step > 0
        self._targets = {EASY: settings.target_easy, HARD: settings.target_hard} if moves else {}
        self._explore = {EASY: settings.explore, HARD: settings.explore}
        self._returned = False  # whether a prompt with a streak was ever played again
        self._streaks: dict[str, tuple[int, str]] = {}  # prompt -> (groups without variance in a row, kind of the last)

    def skip_probability(self, prompt_id: str) -> float:
        """1 - explore^streak: a prompt never loses its chance to come back."""
        streak, kind = self._streaks.get(prompt_id, (0, EASY))
        return 1.0 - max(self._explore[kind] ** streak, LEAST_CHANCE)

    def observe(self, groups: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Note one collected batch: (prompt, the metric of each usable answer) for every group."""
        counts, total = {EASY: 0, HARD: 0}, 0
        for prompt_id, values in groups:
            total += 1
            self._returned |= prompt_id in self._streaks
            if without_variance(values):
                kind = EASY if values[0] > 0 else HARD
                counts[kind] += 1
                self._streaks[prompt_id] = (self._streaks.get(prompt_id, (0, kind))[0] + 1, kind)
            else:
                self._streaks.pop(prompt_id, None)
        if total and self._returned:
            for kind, target in self._targets.items():
                moved = self._explore[kind] + (-self._step if counts[kind] / total >= target else self._step)
                self._explore[kind] = min(HIGHEST, max(moved, LOWEST))

    def metrics(self) -> Metrics:
        """The chances in force, and how many prompts have a streak."""
        return {
            "rollout/explore_easy": Metric.mean(self._explore[EASY]),
            "rollout/explore_hard": Metric.mean(self._explore[HARD]),
            "rollout/prompts_without_variance": Metric.max(len(self._streaks)),
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible; prompts without a streak take no room."""
        streaks = {name: list(one) for name, one in self._streaks.items()}
        return {"explore": dict(self._explore), "streaks": streaks, "returned": self._returned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._explore = {kind: float(state["explore"][kind]) for kind in (EASY, HARD)}
        self._returned = bool(state["returned"])
        self._streaks = {name: (int(streak), str(kind)) for name, (streak, kind) in state["streaks"].items()}


def without_variance(values: Sequence[float]) -> bool:
    """Return whether the values are all the same, up to rounding."""
    return max(values) - min(values) <= 1e-9 * max(1.0, abs(values[0]))
