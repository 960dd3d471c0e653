"""Join engines, rollout, weights and runtime.

The roles come first: `train` (a training engine on each rank), `rollout_role` (the trainer's interface to the rollout)
and `scoring` (another model that scores). `rollout` starts the rollout that a run file names. `pace` finds a slow rank.
Then the rooms: `publishing/` (which replica gets which weights, sends them, compares log-probs), `hosts/` (machines for
servers), `inside/` (code that runs inside server processes), `tenants/` (models that train side by side on one base).
`control` lets servers join or leave a running run; `shared_memory` says if models and servers fit on one device.
"""
