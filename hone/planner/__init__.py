"""Predict a run before its launch.

In reading order: `simulation` (speed and age of tokens of an asynchronous run), `fleet` and `replica` (its servers),
`costs` (of the parts of a step) and `lengths` (of answers), `grid` (the settings to compare).
"""
