"""`hone serve`: a training service that speaks Tinker's protocol.

    client --HTTP--> app (routes) --> Service --in the order of `order`--> Machine: models in training, rollout
                       |                 '-- Registry (SQLite): keys, sessions, commands, checkpoints
                       '-- Futures <-- results

In reading order: `settings`, `order` (which command may run next; pure), `protocol/` (what is sent), `machine` (the
thread that computes), `disk/` (what outlives the process), `futures` and `quotas`, `shared` (what the parts share),
`commands` and `training` (models), `scoring` and `sampling`, `service`, `app` with `listings`, `answers` (OpenAI and
Anthropic), `server`.
"""
