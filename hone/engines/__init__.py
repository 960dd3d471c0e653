"""Training engines: a model that can be trained and asked, one file per backend (see `base` for the contract)."""
