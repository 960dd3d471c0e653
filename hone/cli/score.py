"""`hone score`: score the answers in a file with a reward function.

rows of a file --window of calls--> reward processes --in order--> the same rows with `reward` and `components`

A function that scores whole groups gets the rows of one prompt together.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import pyarrow
import pyarrow.parquet
import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hone.cli.grouping import grouped
from hone.composition import from_yaml
from hone.config import ConfigError, build
from hone.data.columns import nested_columns
from hone.data.settings import DatasetConfig
from hone.data.sources.base import SUFFIXES, Row, Rows, suffix_of
from hone.data.sources.files import open_jsonl, open_parquet
from hone.processes.frames import as_text
from hone.registry import unknown
from hone.rewards.hosting.processes import functions
from hone.rewards.pool import Outcome, RewardPool, encode_case
from hone.rewards.rubric import flatten
from hone.rewards.settings import RewardComponent, RewardConfig

WINDOW = 4096  # calls that may be in progress at once
NEEDED = ("response", "ground_truth")
PROMPTS = ("prompt_id", "prompt", "messages")  # columns that tell which rows answer the same prompt
ADDED = ("reward", "components", "error")
WORKERS: int = RewardConfig.model_fields["workers"].default
TIMEOUT_S: float = RewardComponent.model_fields["timeout_s"].default


@dataclass(frozen=True, slots=True)
class Columns:
    """The file's names of the columns that are needed; a.b is field b of column a."""

    response: Annotated[
        str, typer.Option("--response-column", help="column of the answers; a.b: field b of column a")
    ] = "response"
    ground_truth: Annotated[
        str, typer.Option("--ground-truth-column", help="column of the ground truth; a.b: field b of column a")
    ] = "ground_truth"


@grouped
def score(
    reward: Annotated[str, typer.Option(help="a registered reward, 'module:function' or 'file.py:function'")],
    source: Annotated[Path, typer.Option("--input", help="rows with an answer each (.jsonl, .parquet)")],
    target: Annotated[Path, typer.Option("--output", help="file for the scored rows (.jsonl, .parquet)")],
    columns: Columns,
    option: Annotated[list[str] | None, typer.Option(help="key=value option of the function; may be repeated")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes that run the function")] = WORKERS,
    timeout_s: Annotated[float, typer.Option(help="time limit per row, in seconds")] = TIMEOUT_S,
) -> None:
    """Score the answers in a file with a reward function.

    Each row is written with `reward` and `components`. If its reward failed, `reward` is null and `error` says why.
    """
    rows = read_rows(source, columns)
    _check_target(target)
    name = re.split(r"[:.]", reward)[-1]
    settings = {"reward": reward, "options": _options(option or []), "timeout_s": timeout_s}
    component = build(RewardComponent, settings, source="hone score")
    began = time.perf_counter()
    outcomes = outcomes_of(RewardConfig(components={name: component}, workers=workers), rows)
    seconds = time.perf_counter() - began
    write_rows(target, [scored(row, name, outcome) for row, outcome in zip(rows, outcomes, strict=True)], source)
    typer.echo(_summary(reward, outcomes, seconds, target))
    if all(outcome.error for outcome in outcomes):
        typer.echo(f"every row failed; the first error: {outcomes[0].error}", err=True)
        raise typer.Exit(1)


def read_rows(path: Path, columns: Columns) -> list[Row]:
    """Read all rows of a file and check that each has a text `response` and a `ground_truth`.

    The rows have these two under the file's own names too. Raises ConfigError, which names the file and the line.
    """
    if suffix_of(path) not in SUFFIXES:
        raise ConfigError(f"--input {path} should end in {' or '.join(SUFFIXES)}")
    config = DatasetConfig(path=str(path))
    rows = cast(Rows, open_jsonl(config) if SUFFIXES[suffix_of(path)] == "jsonl" else open_parquet(config))
    if len(rows) == 0:
        raise ConfigError(f"{rows.place} has no rows")
    checked = []
    for index in range(len(rows)):
        row = rows[index]
        for column in NEEDED:
            own = getattr(columns, column)
            known = {**nested_columns(row, [own]), **row}
            if own not in known:
                hint = (
                    f"; if it has another name, give --{column.replace('_', '-')}-column NAME" if own == column else ""
                )
                raise ConfigError(f"{rows.where(index)}: {unknown('column', own, list(row))}{hint}")
            row = {**row, column: known[own]}
        if not isinstance(row["response"], str):
            raise ConfigError(f"{rows.where(index)}: 'response' should be text, found {row['response']!r:.80}")
        if not isinstance(row.get("role") or "", str):
            raise ConfigError(
                f"{rows.where(index)}: 'role', the role that the policy played, should be text, found "
                f"{row['role']!r:.80}; rename the column if it is something else"
            )
        checked.append(row)
    return checked


def score_rows(pool: RewardPool, component: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Outcome]:
    """Yield the outcome of each row, in order, with at most `WINDOW` calls in progress."""
    waiting: deque[Future[Outcome]] = deque()
    for row in rows:
        if len(waiting) == WINDOW:
            yield waiting.popleft().result()
        waiting.append(_submit(pool, component, row))
    while waiting:
        yield waiting.popleft().result()


def score_groups(pool: RewardPool, component: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Outcome]:
    """Yield the outcome of each row, in order, from one call for all rows of a prompt. Raises ConfigError."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(_group_of(row), []).append(index)
    shared = [_shared([rows[index] for index in members]) for members in groups.values()]
    found: dict[int, Outcome] = {}
    for members, outcome in zip(groups.values(), score_rows(pool, component, shared), strict=True):
        found |= zip(members, outcome.of_each(len(members)), strict=True)
    yield from (found[index] for index in range(len(rows)))


def _group_of(row: Mapping[str, Any]) -> str:
    """Return the key that rows of the same group share, as text. Raises ConfigError."""
    if not any(name in row for name in PROMPTS):
        raise ConfigError(
            f"the reward scores all answers to a prompt together, so rows need the column {' or '.join(PROMPTS)}, "
            f"equal in rows of the same prompt (columns: {', '.join(row)})"
        )
    return json.dumps([row.get(name) for name in (*PROMPTS, "step", "ground_truth")], sort_keys=True, default=as_text)


def _shared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row for a group: its answers, and the columns in which all rows agree."""
    alike = {name: value for name, value in rows[0].items() if all(row.get(name) == value for row in rows)}
    return {**alike, "response": [row["response"] for row in rows], "role": [row.get("role") or "" for row in rows]}


def _submit(pool: RewardPool, component: str, row: Mapping[str, Any]) -> Future[Outcome]:
    others = {column: value for column, value in row.items() if column not in (*NEEDED, "role")}
    try:
        case = encode_case(row.get("ground_truth"), others)
        return pool.submit(component, row["response"], row.get("role") or "", case)
    except TypeError as error:  # a column that cannot be sent fails only its row
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
            options[key] = from_yaml(value) if value else ""
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {assignment!r}: the value is not valid YAML") from error
    return options


def outcomes_of(settings: RewardConfig, rows: Sequence[Mapping[str, Any]], *, show: bool = True) -> list[Outcome]:
    """The outcome of each row by the one function of the settings, and a progress bar on standard error if `show`."""
    (name,) = settings.components
    pool = RewardPool(functions(settings))
    pool.start()
    try:
        together = name in pool.whole_groups
        outcomes = score_groups(pool, name, rows) if together else score_rows(pool, name, rows)
        return _with_progress(outcomes, len(rows), show=show)
    finally:
        pool.close()


def _with_progress(outcomes: Iterator[Outcome], total: int, *, show: bool) -> list[Outcome]:
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as progress:
        return list(progress.track(outcomes, total=total))


def scored(row: Mapping[str, Any], name: str, outcome: Outcome) -> dict[str, Any]:
    """A row with its reward and components, or with the reason why there are none."""
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
    """Write all rows to a temporary file and rename it to `path`, so that no partial file is left.

    A Parquet `source` keeps its column types. Raises ConfigError for a value that the format cannot hold.
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
    # half a surrogate pair cannot be encoded: backslashreplace writes it like a JSON escape
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=as_text) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], source: Path) -> None:
    known: dict[str, Any] = {"reward": pyarrow.float64(), "error": pyarrow.string()}
    if SUFFIXES[suffix_of(source)] == "parquet":
        known = {field.name: field.type for field in pyarrow.parquet.read_schema(source)} | known
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: pyarrow.array([row.get(name) for row in rows], type=known.get(name)) for name in names}
    if columns["components"].type.num_fields == 0:  # every row failed: Parquet has no struct without fields
        columns["components"] = pyarrow.nulls(len(rows))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
