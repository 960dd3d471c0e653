"""The error for a model that cannot be loaded or built."""

from __future__ import annotations


class ModelError(ValueError):
    """A model or tokenizer cannot be used. The message is one line."""
