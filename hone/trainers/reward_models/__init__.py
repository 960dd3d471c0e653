"""Reward models of a policy run.

`placement`, `scorer` (scores answers), `process` (a scorer in a process of its own).
"""
