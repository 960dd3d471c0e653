"""Reading of bash scripts without running them.

`script` reads statements, `words` expands words, `arithmetic` computes,
`conditions` tests, and `holes` marks what only running tells.
"""
