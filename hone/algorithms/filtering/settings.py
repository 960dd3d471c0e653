"""Settings of reward shaping, group filters and resampling. No torch in here."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hone.config import Config, setting

OVERLONG = "overlong_penalty"  # of Trajectory.components


class OverlongSettings(Config):
    """DAPO's treatment of answers that come near the length limit, or reach it (arXiv 2503.14476)."""

    buffer_fraction: float | None = setting(
        None,
        "the penalty grows over this last part of the longest response, as a share of it; null: no penalty",
        gt=0,
        le=1,
    )
    buffer_tokens: int | None = setting(
        None, "the same as a number of tokens, in place of buffer_fraction", unit="tokens", ge=1
    )
    factor: float = setting(1.0, "penalty at the limit", ge=0)
    mask: bool = setting(
        False, "answers cut by a length limit get no loss, but count in their group's baseline (overlong filtering)"
    )

    @model_validator(mode="after")
    def _does_something(self) -> OverlongSettings:
        if not self.punishes and not self.mask:
            raise ValueError(
                "overlong needs buffer_fraction or buffer_tokens (a penalty near the limit), mask: true, or both"
            )
        return self

    @property
    def punishes(self) -> bool:
        """Return whether there is a penalty near the limit."""
        return self.buffer_tokens is not None or self.buffer_fraction is not None

    def buffer(self, max_response_tokens: int) -> int:
        """Tokens before the limit over which the penalty grows."""
        if self.buffer_tokens is not None:
            return self.buffer_tokens
        return max(1, round((self.buffer_fraction or 0.0) * max_response_tokens))

    @property
    def ignored(self) -> frozenset[str]:
        if not self.punishes:
            return frozenset({"factor"})
        return frozenset({"buffer_fraction"} if self.buffer_tokens is not None else ())


class SkipZeroVarianceSettings(Config):
    """Prompts whose last groups had no variance are skipped before rollout, with a chance to come back (GRESO)."""

    explore: float = setting(
        0.5,
        "probability p to sample a prompt whose last group had no variance; after z in a row: p^z",
        gt=0,
        le=1,
    )
    explore_step: float = setting(
        0.01, "how much p changes per batch to reach the targets; 0: it is constant", ge=0, lt=1
    )
    target_easy: float = setting(
        0.083, "target share of groups in which all answers succeed (metric above 0)", ge=0, le=1
    )
    target_hard: float = setting(0.167, "target share of groups in which all answers fail", ge=0, le=1)

    @property
    def ignored(self) -> frozenset[str]:
        return frozenset() if self.explore_step > 0 else frozenset({"target_easy", "target_hard"})


class DynamicSamplingSettings(Config):
    """Groups with the same reward for all answers, which give no gradient, are replaced."""

    metric: str = setting("reward", "drop a group if this is the same for all answers: reward, or a component")
    max_draws: int = setting(10, "how many times a step may draw prompts; then it trains on the groups it has", ge=1)
    oversample: float = setting(
        1.0, "prompts per draw, as a multiple of the missing groups; those not needed go back to the data", ge=1
    )
    skip_zero_variance: SkipZeroVarianceSettings | None = setting(
        None, "skip prompts whose next group will probably have no variance (GRESO)"
    )


class ResampleSettings(Config):
    """PF-PPO: trajectories are resampled by their reward."""

    scheme: Literal["power", "best_and_worst", "mostly_best"] = setting(
        "power",
        "weights: |reward|^power; best and worst rewards only; or 0.4 for the best, 0.1 for the rest",
    )
    power: float | None = setting(None, "exponent of scheme power; null: 1", ge=0)

    @model_validator(mode="after")
    def _power_belongs_to_its_scheme(self) -> ResampleSettings:
        if self.power is not None and self.scheme != "power":
            raise ValueError(f"power is the exponent of scheme power, and the scheme is {self.scheme}")
        return self
