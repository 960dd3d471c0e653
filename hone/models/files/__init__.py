"""Models that are not Hugging Face folders yet: `packaged` fetches one with pip, `gguf` converts a GGUF file.

`progress_bars` turns off transformers' own.
"""
