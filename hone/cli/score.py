"""`hone score`: judge the answers in a file with a reward function.

rows of a file --window of calls--> reward processes --in order--> the same rows with `reward` and `components`
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, cast

import pyarrow
import pyarrow.parquet
import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hone.config import ConfigError, build
from hone.data.files import open_jsonl, open_parquet
from hone.data.settings import DatasetConfig
from hone.data.sources import SUFFIXES, Row, Rows
from hone.registry import unknown
from hone.rewards.frames import as_text
from hone.rewards.pool import Outcome, RewardPool, encode_case, functions
from hone.rewards.rubric import flatten
from hone.rewards.settings import RewardComponent, RewardConfig

WINDOW = 4096  # calls submitted ahead of the row that is written next
NEEDED = ("response", "ground_truth")
ADDED = ("reward", "components", "error")
WORKERS: int = RewardConfig.model_fields["workers"].default
TIMEOUT_S: float = RewardComponent.model_fields["timeout_s"].default


def score(
    reward: Annotated[str, typer.Option(help="a registered reward, 'module:function' or 'file.py:function'")],
    source: Annotated[Path, typer.Option("--input", help="rows with 'response' and 'ground_truth' (.jsonl, .parquet)")],
    target: Annotated[Path, typer.Option("--output", help="where the scored rows go (.jsonl, .parquet)")],
    option: Annotated[list[str] | None, typer.Option(help="key=value for the function; may be repeated")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes that run the function")] = WORKERS,
    timeout_s: Annotated[float, typer.Option(help="deadline of one row, in seconds")] = TIMEOUT_S,
) -> None:
    """Judge the answers in a file with a reward function.

    Each row comes back with `reward` and `components`; a row whose reward failed has `reward` null and an `error`.
    """
    rows = read_rows(source)
    _check_target(target)
    name = re.split(r"[:.]", reward)[-1]
    settings = {"reward": reward, "options": _options(option or []), "timeout_s": timeout_s}
    component = build(RewardComponent, settings, source="hone score")
    pool = RewardPool(functions(RewardConfig(components={name: component}, workers=workers)))
    pool.start()
    began = time.perf_counter()
    try:
        outcomes = _with_progress(score_rows(pool, name, rows), len(rows))
    finally:
        pool.close()
    seconds = time.perf_counter() - began
    write_rows(target, [_scored(row, name, outcome) for row, outcome in zip(rows, outcomes, strict=True)], source)
    typer.echo(_summary(reward, outcomes, seconds, target))
    if all(outcome.error for outcome in outcomes):
        typer.echo(f"every row failed; the first: {outcomes[0].error}", err=True)
        raise typer.Exit(1)


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, each checked to have a text `response` and a `ground_truth`.

    Raises ConfigError that names the file and the line.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--input {path} should end in {' or '.join(SUFFIXES)}")
    config = DatasetConfig(path=str(path))
    rows = cast(Rows, open_jsonl(config) if SUFFIXES[path.suffix] == "jsonl" else open_parquet(config))
    if len(rows) == 0:
        raise ConfigError(f"{rows.place} has no rows")
    checked = []
    for index in range(len(rows)):
        row = rows[index]
        for column in NEEDED:
            if column not in row:
                raise ConfigError(f"{rows.where(index)}: {unknown('column', column, list(row))}")
        if not isinstance(row["response"], str):
            raise ConfigError(f"{rows.where(index)}: 'response' should be text, found {row['response']!r:.80}")
        checked.append(row)
    return checked


def score_rows(pool: RewardPool, component: str, rows: Sequence[Row]) -> Iterator[Outcome]:
    """The outcome of each row, in order, with a bounded number of calls under way."""
    waiting: deque[Future[Outcome]] = deque()
    for row in rows:
        if len(waiting) == WINDOW:
            yield waiting.popleft().result()
        waiting.append(_submit(pool, component, row))
    while waiting:
        yield waiting.popleft().result()


def _submit(pool: RewardPool, component: str, row: Row) -> Future[Outcome]:
    others = {column: value for column, value in row.items() if column not in NEEDED}
    try:
        return pool.submit(component, row["response"], encode_case(row["ground_truth"], others))
    except TypeError as error:  # a column that cannot be sent fails its row only
        failed: Future[Outcome] = Future()
        failed.set_result(Outcome(error=str(error)))
        return failed


def _options(assignments: Sequence[str]) -> dict[str, Any]:
    options = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator or not key:
            raise ConfigError(f"--option {assignment!r} should be key=value")
        try:
            options[key] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {assignment!r}: the value is not valid YAML") from error
    return options


def _with_progress(outcomes: Iterator[Outcome], total: int) -> list[Outcome]:
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        return list(progress.track(outcomes, total=total))


def _scored(row: Row, name: str, outcome: Outcome) -> dict[str, Any]:
    kept = {column: value for column, value in row.items() if column not in ADDED}
    if outcome.error:
        return {**kept, "reward": None, "components": {}, "error": outcome.error}
    return {**kept, "reward": outcome.value, "components": flatten({name: outcome})}


def _summary(reward: str, outcomes: Sequence[Outcome], seconds: float, target: Path) -> str:
    values = [outcome.value for outcome in outcomes if not outcome.error]
    late = sum(outcome.late for outcome in outcomes)
    mean = f"mean reward {sum(values) / len(values):.4f}" if values else "no reward"
    failed = f"{len(outcomes) - len(values)} failed" + (f" ({late} timed out)" if late else "")
    rate = f"{seconds:.1f} s, {len(outcomes) / seconds:.0f} rows/s"
    return f"{reward}: {len(outcomes)} rows, {mean}, {failed}, {rate} -> {target}"


# ------------------------------------------------------------------------------------------------------- writing


def _check_target(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--output {path} should end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--output {path}: {'is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output {path}: the folder {path.parent} cannot be written to")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], source: Path) -> None:
    """Write all rows, or nothing: into a file beside `path`, which then takes its place.

    Column types of a Parquet `source` are kept. Raises ConfigError for a value that the format cannot hold.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    write = _write_jsonl if SUFFIXES[path.suffix] == "jsonl" else _write_parquet
    try:
        write(partial, rows, source)
        os.replace(partial, path)
    except (TypeError, pyarrow.ArrowException) as error:
        raise ConfigError(f"--output {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]], source: Path) -> None:
    # half a surrogate pair cannot be encoded: backslashreplace makes of it what JSON escapes look like
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=as_text) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], source: Path) -> None:
    known: dict[str, Any] = {"reward": pyarrow.float64(), "error": pyarrow.string()}
    if SUFFIXES[source.suffix] == "parquet":
        known = {field.name: field.type for field in pyarrow.parquet.read_schema(source)} | known
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: pyarrow.array([row.get(name) for row in rows], type=known.get(name)) for name in names}
    if columns["components"].type.num_fields == 0:  # nothing succeeded: Parquet has no struct without fields
        columns["components"] = pyarrow.nulls(len(rows))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
