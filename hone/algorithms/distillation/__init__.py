"""On-policy distillation from teachers: `settings`, then `losses`."""
