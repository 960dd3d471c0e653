"""Exports: `checkpoint` (a checkpoint as a folder), `rendering` (its chat template), `card` (its README), `push` (to a
hub).
"""
