"""Models that train side by side on one base model: `training`; `sampling` from their snapshots here, `served` by vLLM."""
