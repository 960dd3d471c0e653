"""Models that train side by side on one base.

In reading order: `work` (the data of a command), `training`, `shared_forward` (commands of several models at once),
`sampling` from their snapshots here, `served` by vLLM, `scores`.
"""
