"""Models that train side by side on one base: `training`; `sampling` from their snapshots here, `served` by vLLM."""
