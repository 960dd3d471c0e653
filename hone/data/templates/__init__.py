"""Facts about one chat template, found before the first step.

`forms` (the form in which it takes messages), `pieces` (the answers in a conversation to learn from), `guard` (texts
that would become its control tokens). `ends` are the tokens that end answers, `thoughts` are
answers after an opened thought, `rendered` warns of rows that a template has rendered.
"""
