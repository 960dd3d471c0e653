"""Machines for rollout servers.

`placing` chooses them, `cluster` is a machine of a Ray cluster, `spanning` is several of them for one server, and
`attaching` finds servers that were started elsewhere.
"""
