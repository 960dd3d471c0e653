"""Checkpoints of models: states to train from, snapshots to sample from, exports to take away.

files in a new folder --complete--> row in the registry: it exists --expires, deleted--> row, then files
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hone.models.files.partial import sync
from hone.service.disk.registry import Checkpoint, Model, SnapshotRow
from hone.service.protocol.refusals import BadRequest, NotFound
from hone.service.shared import Shared
from hone.workers.tenants.training import Snapshot

SCHEME = "tinker://"
STATE, SAMPLING, EXTERNAL = "weights", "sampler_weights", "external_weights"
KINDS = (STATE, SAMPLING, EXTERNAL)
FOLDERS = "checkpoints"
URL_S = 3600.0  # that the address of an exported file is valid


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint that is being written."""

    kind: str
    name: str
    ttl_s: int | None = None
    metadata: str = "null"
    overwrite: bool = False


class Checkpoints:
    """The checkpoints of all tenants."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._registry = shared.registry
        self._root = shared.folder / FOLDERS
        self._root.mkdir(parents=True, exist_ok=True)
        self._urls: dict[str, tuple[Checkpoint, float]] = {}  # secret -> whose files it opens, until when

    def new_folder(self) -> Path:
        """A path for files that are about to be written; nothing is there yet."""
        return self._root / secrets.token_hex(12)

    def check_free(self, model: Model, saving: Saving) -> None:
        """Raise BadRequest if the name is taken."""
        path = path_of(model.id, saving.kind, saving.name)
        if not saving.overwrite and self._registry.one(Checkpoint, "path = ?", (path,)) is not None:
            raise BadRequest(f"there is a checkpoint {path} already; choose another name (or overwrite a state)")

    def row(self, model: Model, saving: Saving, folder: Path, digest: str = "") -> Checkpoint:
        """The row of a checkpoint whose files are complete; it exists once the row is in the registry."""
        size, now = flush(folder), time.time()
        return Checkpoint(
            path=path_of(model.id, saving.kind, saving.name),
            tenant=model.tenant,
            run=model.id,
            kind=saving.kind,
            name=saving.name,
            folder=folder.name,
            digest=digest,
            lora=model.lora,
            bytes=size,
            created=now,
            expires=None if saving.ttl_s is None else now + saving.ttl_s,
            metadata=saving.metadata,
        )

    def find(self, tenant: str, path: str, kinds: tuple[str, ...] = KINDS) -> Checkpoint:
        """A tenant's checkpoint. Raises NotFound if there is none, BadRequest if it is of another kind."""
        found = self._registry.one(Checkpoint, "path = ? AND tenant = ?", (path, tenant))
        if found is None or (found.expires is not None and found.expires < time.time()):
            raise NotFound(f"there is no checkpoint {path!r:.300}")
        if found.kind not in kinds:
            raise BadRequest(f"{path} is of the kind {found.kind}; expected {' or '.join(kinds)}")
        return found

    def of_run(self, tenant: str, run: str) -> list[Checkpoint]:
        return self._registry.find(Checkpoint, "run = ? AND tenant = ? ORDER BY created", (run, tenant))

    def folder_named(self, name: str) -> Path:
        return self._root / name

    def snapshot_of(self, folder: str, digest: str, adapter: bool) -> Snapshot:
        return Snapshot(self._root / folder, digest, adapter)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint; a sampling session that uses it samples no more."""
        self._registry.remove(Checkpoint, "path = ?", (checkpoint.path,))
        self.discard(checkpoint.folder)

    def discard(self, folder: str) -> None:
        """Remove files that no row names any more."""
        if folder:
            shutil.rmtree(self._root / folder, ignore_errors=True)

    def set_ttl(self, checkpoint: Checkpoint, ttl_s: int | None) -> None:
        self._registry.put(replace(checkpoint, expires=None if ttl_s is None else time.time() + ttl_s))

    # ------------------------------------------------------------------------------------------- exported files

    def urls(self, checkpoint: Checkpoint, base_url: str) -> tuple[dict[str, str], float]:
        """An address for each exported file, with a secret in it, and the time until which they are valid."""
        now = time.time()
        self._urls = {secret: one for secret, one in self._urls.items() if one[1] > now}
        secret, expires = secrets.token_urlsafe(24), now + URL_S
        self._urls[secret] = (checkpoint, expires)
        names = sorted(path.name for path in self.folder_named(checkpoint.folder).iterdir() if path.is_file())
        return {name: f"{base_url}/api/v1/external/{secret}/{name}" for name in names}, expires

    def exported_file(self, secret: str, name: str) -> Path:
        """The file behind such an address. Raises NotFound."""
        found = self._urls.get(secret)
        if found is None or found[1] < time.time():
            raise NotFound("this address is not valid, or not any more")
        folder = self.folder_named(found[0].folder)
        if not folder.is_dir() or name not in {path.name for path in folder.iterdir()}:
            raise NotFound(f"there is no file {name!r:.200}")
        return folder / name

    # ---------------------------------------------------------------------------------------------------- cleaning

    def sweep(self) -> list[str]:
        """Delete what has expired; returns the folders that are gone."""
        expired = self._registry.find(Checkpoint, "expires < ?", (time.time(),))
        for checkpoint in expired:
            self.remove(checkpoint)
        return [one.folder for one in expired]

    def remove_orphans(self) -> list[str]:
        """Remove the folders that no row names: a killed process was writing them. Returns their names."""
        known = set(self._named())
        orphans = [path for path in self._root.iterdir() if path.name not in known]
        for path in orphans:
            shutil.rmtree(path)
        return [path.name for path in orphans]

    def _named(self) -> Iterator[str]:
        yield from (one.folder for one in self._registry.find(Checkpoint))
        yield from (one.folder for one in self._registry.find(SnapshotRow))
        yield from (one.state_folder for one in self._registry.find(Model))


def path_of(run: str, kind: str, name: str) -> str:
    return f"{SCHEME}{run}/{kind}/{name}"


def flush(folder: Path) -> int:
    """Have the disk itself hold the files of a folder, if the power goes too; returns their bytes."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def described(checkpoint: Checkpoint) -> dict[str, object]:
    """A checkpoint as clients are shown it."""
    kind = {STATE: "training", SAMPLING: "sampler", EXTERNAL: "external"}[checkpoint.kind]
    return {
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": kind,
        "time": stamp(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "public": False,
        "user_metadata": json.loads(checkpoint.metadata),
        "expires_at": None if checkpoint.expires is None else stamp(checkpoint.expires),
    }


def stamp(seconds: float) -> str:
    """A time in ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
