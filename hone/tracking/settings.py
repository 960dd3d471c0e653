"""Settings of tracking: which trackers a run writes to, and how much of what was generated is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hone.config import Choice, Config, FromRegistry, SerializeAsAny, setting
from hone.tracking import TRACKERS


class WandbSettings(Choice):
    """Weights & Biases. Credentials, host and offline mode come from its own environment variables."""

    name: str = "wandb"
    project: str = setting("hone", "W&B project", min_length=1)
    entity: str | None = setting(None, "W&B user or team; empty: the account's default")


class MlflowSettings(Choice):
    """MLflow."""

    name: str = "mlflow"
    uri: str | None = setting(None, "tracking server or store; empty: MLFLOW_TRACKING_URI, else MLflow's own default")
    experiment: str = setting("hone", "MLflow experiment; created if it does not exist", min_length=1)


class TrackioSettings(Choice):
    """trackio. It keeps runs where `TRACKIO_DIR` says, or in its cache folder."""

    name: str = "trackio"
    project: str = setting("hone", "trackio project", min_length=1)
    space: str | None = setting(None, "Hugging Face Space to send the run to; empty: stays on this machine")


def _default_trackers() -> tuple[Choice, ...]:
    return (Choice(name="console"), Choice(name="jsonl"))


class TrackingConfig(Config):
    """Where metrics and rollouts go."""

    trackers: Annotated[tuple[SerializeAsAny[Choice], ...], FromRegistry(TRACKERS)] = setting(
        meaning="where metrics go; jsonl is the record that the report and a resumed run are built on",
        factory=_default_trackers,
    )
    rollouts_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = setting(
        16, "how many trajectories of each step are written to rollouts.jsonl, spread evenly over the step; or 'all'"
    )
    timeout_s: float = setting(
        30.0, "a tracker of another library that takes longer than this is reported and switched off", unit="s", gt=0
    )

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: tuple[Choice, ...]) -> tuple[Choice, ...]:
        names = [tracker.name for tracker in trackers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is named more than once")
        return trackers
