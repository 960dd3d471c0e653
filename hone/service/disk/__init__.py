"""Things that outlive the process: `registry` (SQLite), `keys` of tenants, `checkpoints` (files)."""
