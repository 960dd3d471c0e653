"""Reading of bash scripts without running them.

`script` reads statements, `words` expands words, `arithmetic` computes, and `holes` marks what only running tells.
"""
