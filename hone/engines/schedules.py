"""Learning-rate schedules: pure functions of the step, and the counter that a checkpoint keeps."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from hone.engines.settings import ScheduleConfig


class Schedule:
    """The learning rate of each optimizer step.

    Warm-up rises linearly: step s (from 0) of w has factor (s + 1) / w, so the first step already learns. After it,
    with x from 0 (first step after the warm-up) to 1 (last step of the run):
    constant 1; linear 1 - x (1 - min); cosine min + (1 - min) (1 + cos pi x) / 2; wsd 1, and over the last
    `decay_fraction` of all steps linearly down to min. Steps beyond `total_steps` keep the last factor.
    """

    def __init__(self, config: ScheduleConfig, total_steps: int) -> None:
        self.step_count = 0
        self._name = config.name
        self._warmup = config.warmup_steps
        self._total = total_steps
        # Read only where they matter: a setting that this schedule does not use counts as unread.
        self._min = config.min_ratio if config.name != "constant" else 1.0
        self._decay = max(1, round(config.decay_fraction * total_steps)) if config.name == "wsd" else 0
        if self._name != "constant" and self._warmup >= total_steps:
            raise ValueError(f"engine.schedule: warmup_steps={self._warmup} leaves nothing of {total_steps} steps")

    def factor(self, step: int) -> float:
        """The factor of optimizer step `step`, counted from 0."""
        if step < self._warmup:
            return (step + 1) / self._warmup
        if self._name == "constant":
            return 1.0
        last = self._total - 1
        start = last - self._decay if self._name == "wsd" else self._warmup
        x = min(max(step - start, 0) / max(last - start, 1), 1.0)
        if self._name == "cosine":
            return self._min + (1 - self._min) * (1 + math.cos(math.pi * x)) / 2
        return 1 - x * (1 - self._min)

    def apply(self, optimizer: Optimizer, peak: float) -> float:
        """Set the learning rate of the step to come; returns it."""
        lr = peak * self.factor(self.step_count)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr

    def advance(self) -> None:
        self.step_count += 1
