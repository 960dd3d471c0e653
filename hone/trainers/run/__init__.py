"""Settings of every run.

In reading order: `settings`, `context` (folder, trackers, metrics), `roles` (the models of a run on its devices),
`learners` (the models that change in a step), `following` (a reference that moves), `lost_steps` (steps without a
usable answer), `loop` (the training loop), `checkpoints`, `launch` (a run from start to end), `folder`, `run_model`
(the one model that all parts load), `recorder`, `profiler`, `randomness`, `event_loop` (asyncio).
"""
