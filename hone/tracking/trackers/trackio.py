"""trackio, through its library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from hone.registry import resolve
from hone.tracking.base import FINISHED, RolloutRecord, RunInfo, Tracker, keep_id, known_id
from hone.tracking.settings import TrackioSettings
from hone.tracking.trackers.completions import COLUMNS, table_of

try:
    import trackio
    from trackio.utils import TRACKIO_DIR
except ImportError as error:
    raise ImportError(f"tracker trackio needs the package trackio: pip install 'trackio>=0.5' ({error})") from error


class TrackioTracker(Tracker):
    """Writes scalars, settings and completions to one trackio run, which a resumed run continues.

    trackio keeps every value that it gets, so steps that a resumed run repeats appear twice. It writes in its own
    thread, and warns instead of raising if that fails.
    """

    def __init__(self, settings: TrackioSettings, run: RunInfo) -> None:
        self._settings = settings
        mark = known_id(run, "trackio") or keep_id(run, "trackio", uuid4().hex[:8])
        self._run: Any = trackio.init(
            project=settings.project,
            name=f"{run.name}-{mark}",
            space_id=settings.space,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = settings.space or f"{TRACKIO_DIR} project {settings.project}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        table = table_of(self._settings, step, records)
        if table is not None:
            rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
            self._run.log(
                {f"completions/{table.name}": trackio.Table(dataframe=resolve("pandas:DataFrame")(rows))}, step=step
            )

    def close(self, outcome: str = FINISHED) -> None:
        self._run.finish()
