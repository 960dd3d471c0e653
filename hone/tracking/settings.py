"""Settings of tracking: the trackers of a run, and how many rollouts it keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hone.config import Choice, Config, FromRegistry, SerializeAsAny, setting
from hone.tracking import TRACKERS


class TrackerSettings(Choice):
    """A tracker of another library, which runs in a thread of its own."""

    timeout_s: float = setting(30.0, "if it does not answer for this long, it is switched off", unit="s", gt=0)


class TableSettings(TrackerSettings):
    """A tracker that also gets tables of completions."""

    completions_every_steps: int = setting(
        10, "training steps between tables of completions; evaluations always have one; 0: none", unit="steps", ge=0
    )
    completions: int = setting(8, "rows of a table of completions, of those that `rollouts_per_step` keeps", ge=1)


class TensorBoardSettings(TableSettings):
    """TensorBoard. It writes to the folder `tensorboard` of the run."""

    name: str = "tensorboard"


class WandbSettings(TableSettings):
    """Weights & Biases. Set credentials, host and offline mode with its environment variables."""

    name: str = "wandb"
    project: str = setting("hone", "W&B project", min_length=1)
    entity: str | None = setting(None, "W&B user or team; empty: the account's default")


class MlflowSettings(TableSettings):
    """MLflow."""

    name: str = "mlflow"
    uri: str | None = setting(
        None,
        "tracking server or store; empty: MLFLOW_TRACKING_URI, else MLflow's database, or ./mlruns with mlflow-skinny",
    )
    experiment: str = setting("hone", "MLflow experiment; created if it does not exist", min_length=1)


class TrackioSettings(TableSettings):
    """trackio. It stores runs in `TRACKIO_DIR`, or in its cache folder."""

    name: str = "trackio"
    project: str = setting("hone", "trackio project", min_length=1)
    space: str | None = setting(None, "Hugging Face Space that receives the run; empty: the run stays on this machine")


class TraceSettings(Choice):
    """A timeline of the run for Perfetto, in `trace.json` of the run folder."""

    name: str = "trace"
    max_mib: int = setting(512, "limit of trace.json; the tracker is switched off when it is reached", unit="MiB", ge=1)


LOOPBACK = "127.0.0.1"


class PrometheusSettings(TrackerSettings):
    """The newest metrics at an address that Prometheus scrapes."""

    name: str = "prometheus"
    host: str = setting(LOOPBACK, "address to listen at; another one than the loopback's needs `token_file`")
    port: int = setting(9464, "port to listen at; 0: a free one, which run.json names", ge=0, le=65535)
    token_file: str | None = setting(None, "file with a token that clients have to send; empty: none")


class OpenTelemetrySettings(TrackerSettings):
    """Traces and metrics by OTLP over HTTP."""

    name: str = "opentelemetry"
    endpoint: str | None = setting(
        None, "base address of the collector; empty: OTEL_EXPORTER_OTLP_ENDPOINT, else port 4318 of this machine"
    )


class JsonlSettings(Choice):
    """The run's own record: metrics and rollouts, in files of the run folder."""

    name: str = "jsonl"
    rollouts_max_mib: int = setting(
        2048, "limit of rollouts.jsonl.gz; rollouts that do not fit are left out, metrics are not", unit="MiB", ge=1
    )


def _default_trackers() -> tuple[Choice, ...]:
    return (Choice(name="console"), Choice(name="jsonl"))


class TrackingConfig(Config):
    """Destinations of metrics and rollouts."""

    trackers: Annotated[tuple[SerializeAsAny[Choice], ...], FromRegistry(TRACKERS)] = setting(
        meaning="destinations of metrics; the report and a resumed run read the files of jsonl",
        factory=_default_trackers,
    )
    rollouts_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = setting(
        16, "trajectories per step that are written to rollouts.jsonl.gz, whole groups where they fit; or 'all'"
    )

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: tuple[Choice, ...]) -> tuple[Choice, ...]:
        names = [tracker.name for tracker in trackers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is listed more than once; remove the duplicate")
        return trackers

    @field_validator("trackers")
    @classmethod
    def _only_what_is_set(cls, trackers: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """The run's own record with its default limit is `jsonl` and no more, in each run's settings."""
        return tuple(Choice(name="jsonl") if one == JsonlSettings() else one for one in trackers)
