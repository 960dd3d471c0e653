"""Attention over packed sequences, for any transformers model.

`packed` (the function registered with transformers), `cpu` (a faster bfloat16 kernel), `sequence_parallel` (Ulysses).
"""
