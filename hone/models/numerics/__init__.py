"""Numbers of a model: in which precision and by which operations they are computed.

`precision`: weights that stay in float32; `products`: how a CPU multiplies matrices; `fused_norm`: norms in one kernel.
"""
