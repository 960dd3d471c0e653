"""Decide which groups and prompts are trained on.

`GroupFilter` (`group_filter`) shapes rewards (`overlong`) and filters groups; `history` is GRESO's record of prompts
without variance. `resampling` is PF-PPO's draw, which acts on packed batches. `settings` has the settings of all three.
"""
