"""Models that train side by side on one base model: `training`, and `sampling` from their snapshots."""
