"""Reading of bash scripts without running them.

`script` reads statements, `flow` chooses and repeats them, `words` expands words, `braces` their braces, `arithmetic`
computes, `conditions` tests, `holes` marks what only running tells, and `found` has what was found.
"""
