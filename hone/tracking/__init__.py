"""Tracking: a run's record (metrics, rollouts, a report page) and its live display.

Read `base` (what a tracker is), `settings`, `hub` (`Tracking` sends everything to the trackers of the run file),
`rollouts` (the lines of rollouts.jsonl.gz), `metrics` (timing), `table` (metrics of all steps), `catalogue` (every
metric), `names` (headline metrics), `facts` (run.json), `findings` (marks on charts), `activity` (which part of a run
does what), `muted` (ranks that write nothing), `terminal` and `notebook` (where a run is watched), `trackers/`,
`report/`, `watch/`. This file only names where each tracker is and imports none of them.
"""

from __future__ import annotations

from hone.registry import Entry, Registry

TRACKERS = Registry(
    "tracker",
    {
        "console": Entry("hone.tracking.trackers.console:ConsoleTracker"),
        "jsonl": Entry("hone.tracking.trackers.jsonl:JsonlTracker", "hone.tracking.settings:JsonlSettings"),
        "memory": Entry("hone.tracking.trackers.memory:MemoryTracker"),
        "trace": Entry("hone.tracking.trackers.trace:TraceTracker", "hone.tracking.settings:TraceSettings"),
        "prometheus": Entry(
            "hone.tracking.trackers.prometheus:PrometheusTracker", "hone.tracking.settings:PrometheusSettings"
        ),
        "opentelemetry": Entry(
            "hone.tracking.trackers.opentelemetry:OpenTelemetryTracker", "hone.tracking.settings:OpenTelemetrySettings"
        ),
        "tensorboard": Entry(
            "hone.tracking.trackers.tensorboard:TensorBoardTracker", "hone.tracking.settings:TensorBoardSettings"
        ),
        "wandb": Entry("hone.tracking.trackers.wandb:WandbTracker", "hone.tracking.settings:WandbSettings"),
        "mlflow": Entry("hone.tracking.trackers.mlflow:MlflowTracker", "hone.tracking.settings:MlflowSettings"),
        "trackio": Entry("hone.tracking.trackers.trackio:TrackioTracker", "hone.tracking.settings:TrackioSettings"),
    },
)
