"""Join engines, rollout, weights and runtime.

`train` (hosts a training engine on each rank), `rollout` (starts rollout engines and servers), `rollout_role` (the
trainer's interface to them), `publication` (which replica gets which weights), `sending` (sends them through a
transport), `probe` (compares log-probs after a sync), `scoring` (scores with a rollout engine), `control` (servers
that join or leave a running run), `shared_memory` (do models and servers fit on one device), `cluster_hosts`
(machines of a Ray cluster for servers), `spanning_hosts` (several for one server), `placing` (chooses them),
`attaching` (servers that were started elsewhere), `inside/` (code that runs inside server processes), `tenants`
(models that train side by side on one base), `snapshot_rollout` (samples from their snapshots).
"""
