"""`hone serve`: a training service that speaks Tinker's protocol.

    client --HTTP--> app (routes) --> Service --in the order of `Lane`--> Machine: models in training, rollout
                       |                 '-- Registry (SQLite): keys, sessions, commands, checkpoints
                       '-- Futures <-- results

In reading order: `settings`, `protocol/` (what is sent), `machine` (the thread that computes), `disk/` (what outlives
the process), `futures` and `quotas`, `shared` (what the parts share), `models` (opened, and taken up after a restart),
`commands` and `training`, `scoring` and `sampling`, `service`, `app` with `listings`, `answers` (OpenAI and Anthropic),
`server`.
"""
