"""Weights & Biases, through its library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import uuid4

from hone.tracking.base import FINISHED, INTERRUPTED, RolloutRecord, RunInfo, Tracker, keep_id, known_id
from hone.tracking.settings import WandbSettings
from hone.tracking.trackers.completions import COLUMNS, table_of

try:
    import wandb
except ImportError as error:
    raise ImportError(f"tracker wandb needs the package wandb: pip install 'wandb>=0.19' ({error})") from error

_INTERRUPTED_CODE = 255  # W&B's own for Ctrl-C


class WandbTracker(Tracker):
    """Writes scalars, settings and completions to one W&B run, which a resumed run continues.

    Files are in `<run folder>/wandb`.

    W&B ignores a step that it already has: steps that a resumed run repeats keep their first values, which are equal.
    """

    def __init__(self, settings: WandbSettings, run: RunInfo) -> None:
        self._settings = settings
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=run.name,
            id=known_id(run, "wandb") or keep_id(run, "wandb", uuid4().hex),
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.where = self._run.url or str(self._run.dir)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        table = table_of(self._settings, step, records)
        if table is not None:
            shown = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in table.rows])
            self._run.log({f"completions/{table.name}": shown}, step=step)

    def close(self, outcome: str = FINISHED) -> None:
        self._run.finish(exit_code={FINISHED: 0, INTERRUPTED: _INTERRUPTED_CODE}.get(outcome, 1))
