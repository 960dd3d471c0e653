"""Checks at start-up that a model behaves as the engine assumes.

`isolation`: no token of a packed row depends on what it must not see, for a small model of the same kind; `probe`: the
loaded weights, in the run's precision.
"""
