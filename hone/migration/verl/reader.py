"""Migration of one verl launch: every subject's reader in order, then the check that the result loads."""

from __future__ import annotations

from hone.migration.migration import Migration
from hone.migration.verl import algorithm, batch, data, engine, extras, rollout, sft
from hone.migration.verl.command import Launch
from hone.migration.verl.dropped import drop_the_rest


def migrate_verl(launch: Launch) -> Migration:
    """Return the migration of a launch: settings of `hone train` or `hone sft`, and what became of each option."""
    migration = Migration(launch.options, notes=list(launch.notes), decisions=list(launch.choices))
    if launch.kind == "sft":
        sft.read(migration)
    else:
        batch.read(migration, launch.kind)
        data.read(migration)
        algorithm.read(migration, launch.kind)
        engine.read(migration)
        rollout.read(migration)
        extras.read(migration)
    drop_the_rest(migration)
    return migration
