"""Hugging Face models: loading or building them, their tokenizers, and attention over packed sequences."""
