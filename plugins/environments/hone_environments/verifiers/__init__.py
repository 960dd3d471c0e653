"""Environments of the package `verifiers`, whose rollouts are agents that call the policy through hone's endpoint.

`tasks` (a data source) and `episodes` are hone's side. `rows` and `program` are their programs in the Python that has
the package, which need not be hone's; they import nothing of hone.
"""
