"""Tracking: what a run leaves behind (metrics, rollouts, a page to read them on) and what it shows while it works.

`hone.tracking.hub.Tracking` fans out to the trackers a run file names. This file imports nothing heavy: it only says
where each tracker is.
"""

from __future__ import annotations

from hone.registry import Entry, Registry

TRACKERS = Registry(
    "tracker",
    {
        "console": Entry("hone.tracking.console:ConsoleTracker"),
        "jsonl": Entry("hone.tracking.jsonl:JsonlTracker"),
        "tensorboard": Entry("hone.tracking.tensorboard:TensorBoardTracker"),
        "wandb": Entry("hone.tracking.wandb:WandbTracker", "hone.tracking.settings:WandbSettings"),
        "mlflow": Entry("hone.tracking.mlflow:MlflowTracker", "hone.tracking.settings:MlflowSettings"),
        "trackio": Entry("hone.tracking.trackio:TrackioTracker", "hone.tracking.settings:TrackioSettings"),
    },
)
