"""Files of tensors that are on the disk when they have been written, and wait for room on a full one."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hone.full_disk import system_error, until_room
from hone.models.files.partial import sync


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. A full disk is waited for; see `full_disk`. Raises OSError."""
    until_room(partial(_save_synced, dict(tensors), path, dict(metadata or {"format": "pt"})))


def _save_synced(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
        sync(path)  # some file systems find out here that they are full
    except SafetensorError as error:  # it names an error of the system by its number only
        path.unlink(missing_ok=True)  # half a file would take the room that the record of the run needs
        known = system_error(error, str(path))
        raise known or OSError(errno.EIO, f"safetensors: {error}", str(path)) from error


__all__ = ["save_tensors"]
