"""Attention over packed sequences, for any transformers model.

`packed` (the function registered with transformers), `varlen` (FlashAttention, on devices that have it), `tiled` (soft
caps and sinks on every device, and a faster bfloat16 backward on CPUs), `flex` (soft caps and sinks by torch's flex
attention), `sequence_parallel` (Ulysses), `stateful` (layers that carry a state see one sequence of a row at a time).

`support` says which models cannot be computed exactly. `adapting` changes a loaded model: `temperature` (queries scaled
by position) and `indexed` (sparse attention). `chunks` cuts a packed row at the ends of chunks; `explicit` writes out
what no kernel computes. `shapes` reads sizes off an empty model.
"""
