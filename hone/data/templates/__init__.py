"""Facts about one chat template, found before the first step.

`forms` (the form in which it takes messages), `pieces` (the answers in a conversation to learn from), `guard` (texts
that would become its control tokens).
"""
