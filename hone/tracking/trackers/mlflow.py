"""MLflow, through its client library."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from hone.tracking.base import (
    FINISHED,
    INTERRUPTED,
    RolloutRecord,
    RunInfo,
    Tracker,
    flat_config,
    keep_id,
    known_id,
    plain_name,
)
from hone.tracking.settings import MlflowSettings
from hone.tracking.trackers.completions import COLUMNS, table_of

try:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient
except ImportError as error:
    raise ImportError(
        f"tracker mlflow needs the package mlflow-skinny: pip install 'mlflow-skinny>=3' ({error})"
    ) from error

_PARAMS_PER_CALL = 100  # MLflow's limits
_METRICS_PER_CALL = 1000
_PARAM_LENGTH = 6000
_NAME_LENGTH = 250


class MlflowTracker(Tracker):
    """Writes scalars as metrics, settings as parameters and completions as files of one MLflow run.

    A resumed run continues it.

    MLflow allows fewer names than hone (see `Names`): `eval/sort/mean@4` becomes `eval/sort/mean_4`. It keeps every
    value that it gets, so steps that a resumed run repeats appear twice.
    """

    def __init__(self, settings: MlflowSettings, run: RunInfo) -> None:
        self._settings = settings
        self._client = MlflowClient(tracking_uri=_store(settings.uri))
        known = known_id(run, "mlflow")
        if known is None:
            created = self._client.create_run(self._experiment(settings.experiment), run_name=run.name)
            known = keep_id(run, "mlflow", created.info.run_id)
            self._log_settings(known, run)
        else:
            self._client.update_run(known, status="RUNNING")
        self._run_id = known
        self._names = Names(self._client.get_run(known).data.metrics)
        self.where = f"{self._client.tracking_uri} run {known}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = (Metric(self._names.of(name), values[name], now, step) for name in sorted(values))
        while batch := list(islice(metrics, _METRICS_PER_CALL)):
            self._client.log_batch(self._run_id, metrics=batch)

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        table = table_of(self._settings, step, records)
        if table is not None:  # a file in the form of MLflow's own tables, which need pandas
            rows = {"columns": list(COLUMNS), "data": [list(row) for row in table.rows]}
            self._client.log_dict(self._run_id, rows, f"completions/{plain_name(table.name)}/step_{step:08d}.json")

    def close(self, outcome: str = FINISHED) -> None:
        status = {FINISHED: "FINISHED", INTERRUPTED: "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._run_id, status)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _log_settings(self, known: str, run: RunInfo) -> None:
        names = Names()
        params = (Param(names.of(k), str(v)[:_PARAM_LENGTH]) for k, v in flat_config(run.config).items())
        while batch := list(islice(params, _PARAMS_PER_CALL)):
            self._client.log_batch(known, params=batch)


class Names:
    """The name at MLflow of each of hone's: always the same in one launch, and never that of another.

    MLflow's store of files has a file for each name, so it cannot have `a` beside `a/b`: the second becomes `a.b`, or
    `a_` if `a` is the second. Characters that MLflow refuses become `_`, long names end in a digest, and a name that
    is taken gets a number.

    >>> names = Names()
    >>> [names.of(name) for name in ("a", "a/b", "c@1", "c_1", "a/b")]
    ['a', 'a.b', 'c_1', 'c_1_2', 'a.b']
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        """`known` are names of an earlier launch, which stay what they are."""
        self._files = set(known)
        self._found: dict[str, str] = {}

    def of(self, name: str) -> str:
        if name not in self._found:
            plain, number, taken = _allowed(name), 1, set(self._found.values())
            chosen = self._beside_others(plain)
            while chosen in taken:
                number += 1
                chosen = self._beside_others(f"{plain}_{number}")
            self._found[name] = chosen
            self._files.add(chosen)
        return self._found[name]

    def _beside_others(self, name: str) -> str:
        for at, character in enumerate(name):
            if character == "/" and name[:at] in self._files:
                return self._beside_others(f"{name[:at]}.{name[at + 1 :]}")
        if any(other.startswith(f"{name}/") for other in self._files):
            return self._beside_others(f"{name}_")
        return name


def _allowed(name: str) -> str:
    """The name with MLflow's characters and length, as a path without empty parts and steps upwards."""
    parts = [f"_{part}" if part.strip(".") == "" or part.startswith("..") else part for part in name.split("/") if part]
    plain = plain_name("/".join(parts)) or "_"
    if len(plain) <= _NAME_LENGTH - 10:  # room for a number
        return plain
    return f"{plain[: _NAME_LENGTH - 30]}_{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"


def _store(uri: str | None) -> str | None:
    """The address of the store; MLflow's own default if neither the settings nor the environment name one.

    That is a database, which mlflow-skinny cannot open: then it is the folder `mlruns`, MLflow's default before.
    """
    if uri is None and not os.environ.get("MLFLOW_TRACKING_URI") and importlib.util.find_spec("sqlalchemy") is None:
        uri = Path("mlruns").resolve().as_uri()
    if uri is not None and (uri.startswith("file:") or "://" not in uri):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks who names a folder to say so twice
    return uri
