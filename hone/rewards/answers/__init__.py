"""Answers of a kind: `words` and `choices` are no formulas, `times` and `units` are numbers of something.

`numerals` reads numbers in words, `notation` other spellings of a formula, `inequalities` those in a variable as sets.
"""
