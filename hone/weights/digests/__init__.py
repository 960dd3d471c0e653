"""Checksums of weights.

Read `digest` (the interface), `row_digest` (any device), `byte_digest` (XXH3 in host memory), `packed` (tensors in one
buffer).
"""
