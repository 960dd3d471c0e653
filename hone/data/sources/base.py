"""Sources of rows: files, libraries and Python functions behind one protocol, `Rows`."""

from __future__ import annotations

import difflib
import glob
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from hone.config import ConfigError
from hone.data import SOURCES
from hone.data.settings import PythonSettings, RowsConfig
from hone.registry import resolve

Row = Mapping[str, Any]
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
FILES_OF_DATASETS: dict[str, tuple[str, dict[str, Any]]] = {  # files that source hf reads: loader, and its options
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".txt": ("text", {}),
    ".arrow": ("arrow", {}),
}


class DataError(ConfigError):
    """Error for an unusable data set; the message names the file, row or column in one sentence."""


class Rows(Protocol):
    """A data set's rows, readable in any order."""

    place: str  # where the rows come from, for messages
    columns: Mapping[str, str]  # standard column -> this source's name for it, where they differ
    blocks: Sequence[int] | None  # rows in each block that is read at once; None: any row is cheap to read
    fills_gaps: bool  # whether a key that a row does not have is there, with null

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """The row's place for messages, such as 'train.jsonl line 12'."""

    def folder(self, index: int) -> Path:
        """The folder that relative paths in the row start from: its file's folder, or the working folder."""


def open_rows(config: RowsConfig, key: str = "data.train") -> Rows:
    """Open the rows of a data set; `key` is the key of its settings in the run file, for messages.

    Raises DataError for a missing or malformed file, an unknown suffix, or a set without rows.
    """
    name = config.source.name if config.source else _by_suffix(config.path, key)
    opener = cast(Callable[[RowsConfig], Rows], SOURCES.get(name))
    try:
        rows = opener(config)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if len(rows) == 0:
        raise DataError(f"{key}: {rows.place} has no rows")
    return rows


def check_path(config: RowsConfig, key: str) -> None:
    """Raise DataError for a data set in files that do not exist, without reading any."""
    if config.source is None:
        name = _by_suffix(config.path, key)
        if name in SUFFIXES.values() and not (Path(config.path).exists() or glob.glob(config.path, recursive=True)):
            raise DataError(f"{key}.path: no file {config.path}{nearest(Path(config.path))}")


def suffix_of(path: str | Path) -> str:
    """The suffix that names the format; of a compressed file, the one before `.gz`.

    >>> suffix_of("rows.jsonl"), suffix_of("rows.jsonl.gz")
    ('.jsonl', '.jsonl')
    """
    name = Path(path)
    inner = name.with_suffix("").suffix
    return inner if name.suffix == ".gz" and SUFFIXES.get(inner) == "jsonl" else name.suffix


def _by_suffix(path: str, key: str) -> str:
    if not path:
        raise DataError(f"{key}: set path to a file, or source to one of {', '.join(SOURCES)}")
    if Path(path).is_dir() or (Path(path).is_file() and Path(path).suffix in FILES_OF_DATASETS):
        return "hf"
    suffix = suffix_of(path)
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if Path(path).is_file():
        known = " or ".join([*SUFFIXES, *FILES_OF_DATASETS])
        raise DataError(f"{key}.path: {path} should end in {known}; for other files set {key}.source")
    hub = "" if suffix in FILES_OF_DATASETS else f"; for a data set on the hub set {key}.source=hf"
    raise DataError(f"{key}.path: no file or folder {path}{nearest(Path(path))}{hub}")


def nearest(path: Path) -> str:
    """'; did you mean ...?' with the most similar file in the folder of a missing one, or the current folder."""
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.5)
    here = "" if path.is_absolute() else f" (current folder: {Path.cwd()})"
    return f"; did you mean {path.with_name(near[0])}?" if near else here


# ----------------------------------------------------------------------------------------------- Python functions


class ListRows:
    """Rows in a list, or in any sequence that makes them on demand."""

    blocks = None

    def __init__(
        self, rows: Sequence[Row], place: str, columns: Mapping[str, str] | None = None, fills_gaps: bool = False
    ) -> None:
        self._rows = rows
        self.fills_gaps = fills_gaps
        self.place = place
        self.columns = columns or {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{self.where(index)} should be a mapping of columns, found {type(row).__name__}")
        return row

    def where(self, index: int) -> str:
        return f"{self.place} row {index}"

    def folder(self, index: int) -> Path:
        return Path()


def open_function(config: RowsConfig) -> ListRows:
    """Open the rows that a Python function returns for a seed and a size.

    A result with a length and indexing is read row by row when needed; any other iterable is read into a list of at
    most `size` rows.
    """
    settings = config.source
    assert isinstance(settings, PythonSettings)
    try:
        function = resolve(settings.function)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"source.function={settings.function}: {error}") from error
    if not callable(function):
        raise DataError(f"source.function={settings.function} is not a function but a {type(function).__name__}")
    given = {**settings.options, "seed": settings.seed, "size": settings.size}
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        found = ", ".join(given)
        raise DataError(f"source.options: {settings.function} cannot be called with {found}: {error}") from error
    result = function(**given)
    if not isinstance(result, Iterable):
        raise DataError(f"{settings.function} should give rows, but gave a {type(result).__name__}")
    rows = result if isinstance(result, Sequence) else list(itertools.islice(result, settings.size))
    return ListRows(rows, settings.function)
