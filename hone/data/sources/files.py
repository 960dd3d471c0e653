"""JSONL and Parquet files of any size, read by an index of line offsets, or one row group at a time."""

from __future__ import annotations

import glob
import gzip
import itertools
import json
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pyarrow
import pyarrow.parquet

from hone.data.messages import object_of
from hone.data.settings import RowsConfig
from hone.data.sources.base import DataError, Row, nearest

GROUPS_IN_MEMORY = 4  # Parquet row groups kept in memory; a shuffle mixes the rows of this many
BATCH_ROWS, BATCH_BYTES = 1024, 1 << 28  # of a row group, read at once
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHANGED = "has changed since it was opened; a run reads rows when it needs them, so write new data to another file"


def open_jsonl(config: RowsConfig) -> JsonlRows:
    """Rows of JSON Lines files: one object per line."""
    return JsonlRows(_paths(config.path))


def open_parquet(config: RowsConfig) -> ParquetRows:
    """Rows of Parquet files."""
    return ParquetRows(_paths(config.path))


def _paths(pattern: str) -> list[Path]:
    """The files that match a path or a pattern such as data/*.jsonl, sorted by name."""
    if not pattern:
        raise DataError("this data source needs a path")
    path = Path(pattern)
    found = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if not found:
        raise DataError(f"no file {pattern}{nearest(path)}")
    for one in found:
        if not one.is_file():
            raise DataError(f"{one} should be a file, but is {'a folder' if one.is_dir() else 'a pipe or a device'}")
        if not os.access(one, os.R_OK):
            raise DataError(f"{one} cannot be read: permission denied")
    return found


class JsonlRows:
    """Files with one JSON object per line; empty lines are skipped.

    Opening scans the files once for line offsets, and checks that each line begins and ends like an object, so that a
    truncated file fails before training starts. Other errors in a line appear when it is read; so does a line that has
    changed since then. A `.gz` file is unpacked into a temporary file, which has no name and ends with this object.
    """

    blocks = None
    fills_gaps = False
    columns: Mapping[str, str] = {}

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self.place = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._offsets = array("q")
        self._checksums = array("I")
        self._firsts: list[int] = []  # number of the first row of each file
        self._unpacked = {path: _unpacked(path) for path in paths if path.suffix == ".gz"}  # descriptors
        for descriptor in self._unpacked.values():
            weakref.finalize(self, os.close, descriptor)
        for path in paths:
            self._firsts.append(len(self._offsets))
            self._index(path)

    def _index(self, path: Path) -> None:
        offset = 0
        with self._open(path) as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
                if text and not (text.startswith(b"{") and text.endswith(b"}")):
                    shown = text[:60].decode("utf-8", errors="replace")
                    fix = "; name a file with one JSON list .json" if text.startswith(b"[") else ""
                    raise DataError(f"{path} line {number} should be one JSON object, found {shown!r}{fix}")
                if text:
                    self._offsets.append(offset)
                    self._checksums.append(zlib.crc32(text))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        path = self._paths[self._file(index)]
        try:
            with self._open(path) as file:  # for each row, so that nothing is left to close or shared with a fork
                file.seek(self._offsets[index])
                line = file.readline().removeprefix(BYTE_ORDER_MARK).strip()
        except OSError as error:
            raise DataError(f"row {index} of {path} cannot be read any more: {error.strerror}") from error
        if zlib.crc32(line) != self._checksums[index]:
            raise DataError(f"{self.where(index)} {CHANGED}")
        try:
            row = json.loads(line, object_pairs_hook=object_of)
        except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, a key twice
            raise DataError(f"{self.where(index)} is not valid JSON: {error}") from error
        except RecursionError as error:
            raise DataError(f"{self.where(index)} is nested too deeply to be read") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)} should be one JSON object, found {type(row).__name__}")
        return row

    def where(self, index: int) -> str:
        path, number, left = self._paths[self._file(index)], 1, self._offsets[index]
        with self._open(path) as file:
            while left and (chunk := file.read(min(left, 1 << 20))):
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{path} line {number}"

    def folder(self, index: int) -> Path:
        return self._paths[self._file(index)].parent

    def _open(self, path: Path) -> IO[bytes]:
        unpacked = self._unpacked.get(path)
        # /dev/fd opens it again: the position of an open file is shared with forked processes
        return path.open("rb") if unpacked is None else open(f"/dev/fd/{unpacked}", "rb")

    def _file(self, index: int) -> int:
        if not 0 <= index < len(self._offsets):
            raise IndexError(f"row {index} of {len(self._offsets)} in {self.place}")
        return bisect_right(self._firsts, index) - 1


def _unpacked(path: Path) -> int:
    """A descriptor of a file without a name, with the content of a gzip file."""
    try:
        with gzip.open(path) as source, tempfile.TemporaryFile() as target:
            shutil.copyfileobj(source, target)
            target.flush()
            return os.dup(target.fileno())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be unpacked into {tempfile.gettempdir()}: {error.strerror or error}; if there is no room, "
            "name another folder by the environment variable TMPDIR, or unpack the file yourself"
        ) from error


class ParquetRows:
    """Parquet files, read by row group; the last few row groups stay in memory."""

    fills_gaps = True
    columns: Mapping[str, str] = {}

    def __init__(self, paths: list[Path]) -> None:
        self.place = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._groups: list[tuple[Path, int]] = []
        self._metadata: dict[Path, pyarrow.parquet.FileMetaData] = {}
        sizes: list[int] = []
        for path in paths:
            metadata = self._metadata[path] = _metadata(path)
            self._groups += [(path, number) for number in range(metadata.num_row_groups)]
            sizes += [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self.blocks = sizes
        self._firsts = [0, *itertools.accumulate(sizes)]  # number of the first row of each group, then the total
        self._cache: OrderedDict[int, pyarrow.Table] = OrderedDict()

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Row:
        group = self._group(index)
        try:
            row: Row = self._table(group).slice(index - self._firsts[group], 1).to_pylist()[0]
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:  # no UTF-8, a broken page ...
            raise DataError(f"{self.where(index)} cannot be read: {error}") from error
        return row

    def where(self, index: int) -> str:
        path, _ = self._groups[self._group(index)]
        first = next(number for number, (other, _) in enumerate(self._groups) if other == path)
        return f"{path} row {index - self._firsts[first]}"

    def folder(self, index: int) -> Path:
        return self._groups[self._group(index)][0].parent

    def _group(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.place}")
        return bisect_right(self._firsts, index) - 1

    def _table(self, group: int) -> pyarrow.Table:
        if group not in self._cache:
            path, number = self._groups[group]
            if not _metadata(path).equals(self._metadata[path]):
                raise DataError(f"{path} {CHANGED}")
            with pyarrow.parquet.ParquetFile(path, metadata=self._metadata[path]) as file:
                # By batches: Arrow reads no nested column of more than 2 GiB at once, such as lists of images.
                rows = _rows_of_a_batch(self._metadata[path].row_group(number))
                batches = file.iter_batches(batch_size=rows, row_groups=[number])
                self._cache[group] = pyarrow.Table.from_batches(batches, schema=file.schema_arrow)
            if len(self._cache) > GROUPS_IN_MEMORY:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return self._cache[group]


def _rows_of_a_batch(group: pyarrow.parquet.RowGroupMetaData) -> int:
    each: int = max(1, group.total_byte_size // max(1, group.num_rows))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // each))


def _metadata(path: Path) -> pyarrow.parquet.FileMetaData:
    try:
        found = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    names = found.schema.to_arrow_schema().names
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise DataError(f"{path} has the column {twice!r} twice; rename one of them")
    return found
