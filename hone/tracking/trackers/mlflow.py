"""MLflow, through its client library."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice

from hone.tracking.base import FINISHED, INTERRUPTED, RunInfo, Tracker, flat_config, keep_id, known_id, plain_name
from hone.tracking.settings import MlflowSettings

try:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient
except ImportError as error:
    raise ImportError(
        f"tracker mlflow needs the package mlflow-skinny: pip install 'mlflow-skinny>=3' ({error})"
    ) from error

_PARAMS_PER_CALL = 100  # MLflow's limits
_PARAM_LENGTH = 6000


class MlflowTracker(Tracker):
    """Writes scalars as metrics and settings as parameters of one MLflow run, which a resumed run continues.

    MLflow allows fewer characters in names: `eval/sort/mean@4` becomes `eval/sort/mean_4`. It keeps every value that it
    gets, so steps that a resumed run repeats appear twice.
    """

    def __init__(self, settings: MlflowSettings, run: RunInfo) -> None:
        self._client = MlflowClient(tracking_uri=settings.uri)
        known = known_id(run, "mlflow")
        if known is None:
            created = self._client.create_run(self._experiment(settings.experiment), run_name=run.name)
            known = keep_id(run, "mlflow", created.info.run_id)
            self._log_settings(known, run)
        else:
            self._client.update_run(known, status="RUNNING")
        self._run_id = known
        self.where = f"{self._client.tracking_uri} run {known}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(plain_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, outcome: str = FINISHED) -> None:
        status = {FINISHED: "FINISHED", INTERRUPTED: "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._run_id, status)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _log_settings(self, known: str, run: RunInfo) -> None:
        params = iter(Param(plain_name(k), str(v)[:_PARAM_LENGTH]) for k, v in flat_config(run.config).items())
        while batch := list(islice(params, _PARAMS_PER_CALL)):
            self._client.log_batch(known, params=batch)
