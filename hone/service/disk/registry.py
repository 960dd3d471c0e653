"""The registry: what the service knows on disk, in SQLite. Everything that was confirmed to a client is here.

    keys         tenants, by the hash of their key           sessions      of clients
    models       in training, and where their last state is  commands      of a model: content and result
    checkpoints  by path; files are in folders of their own   snapshots     of sampling sessions

A row is written after the files that it names, and files without a row are removed at the next start: a process that
is killed leaves nothing half-written that anybody sees.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

FORMAT = 2
DISK_ERRORS = (OSError, sqlite3.Error)  # of a disk that is full
REGISTRY_FILE = "registry.sqlite"  # in the folder of a service


@dataclass(frozen=True, slots=True)
class Key:
    """A tenant, and what it may use."""

    name: str
    id: str
    hash: str
    models: int | None
    tokens_per_minute: int | None
    bytes: int | None  # of checkpoints
    created: float


NOBODY = Key("", "", "", None, None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a client."""

    id: str
    tenant: str
    created: float
    facts: str  # JSON: tags, metadata, version of the client
    ended: str  # why; empty: it goes on


@dataclass(frozen=True, slots=True)
class Model:
    """A model in training: a training run."""

    id: str
    tenant: str
    session: str
    seed: int
    lora: str  # JSON of the client's lora_config; null: all weights
    metadata: str
    created: float
    used: float
    state_after: int = -1  # number of the last command that is in `state_folder`; -1: none
    state_folder: str = ""
    closed: int = 0

    @property
    def lora_config(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = json.loads(self.lora)
        return found


@dataclass(frozen=True, slots=True)
class CommandRow:
    """A command of a model; `ended` is 0 until it has a result."""

    model: str
    number: int
    kind: str
    digest: str
    body: bytes | None  # None: it is not needed any more
    result: bytes | None = None
    media: str = ""
    error: str = ""
    category: str = ""
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state, snapshot or export."""

    path: str  # tinker://RUN/KIND/NAME
    tenant: str
    run: str
    kind: str  # weights, sampler_weights, external_weights
    name: str
    folder: str
    digest: str  # of the tensors of a snapshot
    lora: str
    bytes: int
    created: float
    expires: float | None
    metadata: str

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """The weights that a sampling session samples from."""

    id: str
    tenant: str
    session: str
    path: str  # of the checkpoint; empty: the base, or a snapshot of its own
    folder: str  # empty: the base, or `follows`
    digest: str
    adapter: int
    follows: str  # model whose newest snapshot it samples from
    created: float
    bytes: int  # of `folder`


T = TypeVar("T", Key, Session, Model, CommandRow, Checkpoint, SnapshotRow)
TABLES: dict[type[Any], str] = {  # of a kind of row
    Key: "keys",
    Session: "sessions",
    Model: "models",
    CommandRow: "commands",
    Checkpoint: "checkpoints",
    SnapshotRow: "snapshots",
}
PRIMARY = {Key: "name", CommandRow: "model, number", Checkpoint: "path"}  # of the others it is id
INDEXES = ("keys (id)", "models (session)", "checkpoints (run)", "snapshots (session)")


class Registry:
    """One SQLite file. Used by one process at a time, except for keys."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            raise ValueError(
                f"{path} has the format {found}, and this version of hone writes {FORMAT}: use another folder"
            )
        for cls, table in TABLES.items():
            names = ", ".join(one.name for one in fields(cls))
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({names}, PRIMARY KEY ({PRIMARY.get(cls, 'id')}))")
        for index in INDEXES:
            self._db.execute(f"CREATE INDEX IF NOT EXISTS {index.replace(' (', '_').rstrip(')')} ON {index}")
        self._db.execute(f"PRAGMA user_version={FORMAT}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make all changes within, or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite has not rolled it back itself, as it may on a full disk
                self._db.execute("ROLLBACK")
            raise

    def put(self, row: T) -> None:
        """Write a row, in place of the one with its primary key."""
        values = asdict(row)
        marks = ", ".join("?" for _ in values)
        self._db.execute(
            f"INSERT OR REPLACE INTO {TABLES[type(row)]} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
        )

    def find(self, cls: type[T], where: str = "1", values: Sequence[Any] = ()) -> list[T]:
        """The rows of a kind for which the SQL condition `where` holds."""
        names = ", ".join(one.name for one in fields(cls))
        return [
            cls(*row) for row in self._db.execute(f"SELECT {names} FROM {TABLES[cls]} WHERE {where}", tuple(values))
        ]

    def one(self, cls: type[T], where: str, values: Sequence[Any]) -> T | None:
        return next(iter(self.find(cls, where, values)), None)

    def change(self, cls: type[Any], change: str, where: str, values: Sequence[Any]) -> None:
        self._db.execute(f"UPDATE {TABLES[cls]} SET {change} WHERE {where}", tuple(values))

    def remove(self, cls: type[Any], where: str, values: Sequence[Any]) -> None:
        self._db.execute(f"DELETE FROM {TABLES[cls]} WHERE {where}", tuple(values))

    def drop_gradients(self, model: str) -> None:
        """Keep no gradient of a model that is in its state, or that a step has used, or dropped by failing."""
        steps = "SELECT COALESCE(MAX(number), 0) FROM commands WHERE model = ?1 AND kind = 'optim_step' AND ended > 0"
        last = f"MAX(({steps}), (SELECT state_after FROM models WHERE id = ?1))"
        self._db.execute(f"UPDATE commands SET body = NULL WHERE model = ?1 AND number <= {last}", (model,))

    def kept_bytes(self, model: str, number: int) -> int:
        """Bytes of the commands that a restart repeats, up to a number."""
        return self._total("LENGTH(body)", "commands WHERE model = ? AND number <= ?", model, number)

    def used_bytes(self, tenant: str) -> int:
        """Bytes of a tenant's checkpoints and of the snapshots that only its open sessions have."""
        both = "SELECT bytes, tenant FROM checkpoints UNION ALL SELECT bytes, tenant FROM snapshots"
        return self._total("bytes", f"({both}) WHERE tenant = ?", tenant)

    def _total(self, what: str, where: str, *values: Any) -> int:
        return int(self._db.execute(f"SELECT COALESCE(SUM({what}), 0) FROM {where}", values).fetchone()[0])
