"""The DPO family, KTO and reward-model losses: `settings`, then `losses`."""
