"""Answers that are no formula: `words`, and `inequalities`, which are sets of numbers."""
