"""Play an environment without a model and say what is wrong with it (`hone env check`).

In reading order: `policies` (who plays), `check` (the episodes, and what is looked at).
"""
