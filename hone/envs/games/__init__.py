"""Environments that answer an action in text with an observation in text.

In reading order: `text_actions` (what they share), `gymnasium` (Gymnasium environments), `openenv` (environments of
OpenEnv servers), `textworld` (games of TextWorld) and `textworld_program`, its side in the Python that has the package,
`puzzles` (attempts at problems of Reasoning Gym) and `puzzle_program`, their verifiers.
"""
