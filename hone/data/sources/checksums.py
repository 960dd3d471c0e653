"""A checksum of the files of a data set, by which a continued run finds out that they are others."""

from __future__ import annotations

import glob
import logging
import zlib
from pathlib import Path

LOG = logging.getLogger("hone")
MOST_BYTES = 1 << 30  # that are read; of what is beyond, only the size counts
CHUNK = 1 << 22


def checksum(path: str) -> str:
    """The checksum of the files at a path, pattern or folder; "" where there are none, such as a name on the hub."""
    place = Path(path)
    found = [place] if place.is_file() else [*place.rglob("*")] if path and place.is_dir() else []
    if path and not place.exists():
        found = [Path(name) for name in glob.glob(path, recursive=True)]
    files = sorted(one for one in found if one.is_file())
    total, left = 0, MOST_BYTES
    for one in files:
        total = zlib.crc32(f"{one.stat().st_size}".encode(), total)
        with one.open("rb") as file:
            while chunk := file.read(min(CHUNK, left)):
                total, left = zlib.crc32(chunk, total), left - len(chunk)
    return f"{total:08x}" if files else ""


def tell_changed(key: str, place: str) -> None:
    """Warn that a run goes on with other rows than it began with."""
    LOG.warning(
        "%s: %s is not what it was when the checkpoint was written. The run goes on at its place in the order of rows, "
        "so it may repeat or miss some of them; put the earlier file back, or begin anew with another run.dir",
        key, place,
    )  # fmt: skip
