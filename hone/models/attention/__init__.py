"""Attention over packed sequences, for any transformers model.

`packed` (the function registered with transformers), `varlen` (FlashAttention, on devices that have it), `tiled` (soft
caps and sinks on every device, and a faster bfloat16 backward on CPUs), `flex` (soft caps and sinks by torch's flex
attention), `sequence_parallel` (Ulysses), `stateful` (layers that carry a state see one sequence of a row at a time).
"""
