"""Kernels of hone's own. `choice`: whether this process uses them; `triton_scores`: log-probs and entropy of a chunk of
logits, and their gradient."""
