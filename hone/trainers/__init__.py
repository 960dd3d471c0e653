"""The training loops.

`run/` (what every run has: loop, checkpoints, run folder), `policy/` (reinforcement learning and distillation),
`supervised/` (SFT, preferences, reward models), `reward_models/` (reward models that score a policy's answers),
`answering/` (finished models that answer, without training), `forecast/` (memory and time of a run before it starts),
`exports/` (what a run leaves for others).
"""
