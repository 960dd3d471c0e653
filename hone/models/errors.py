"""What is raised when a model cannot be loaded or built."""

from __future__ import annotations


class ModelError(ValueError):
    """A model, or its tokenizer, that cannot be used; the message is one line for a person."""
