"""Reinforcement learning.

In reading order: `settings`, `trainer` (collect, update), `feed` (groups in draw order, in turns with training or ahead
of it), `collection` (prompts to scored groups), `generation` (rollout engine, environments, rewards), `teachers`,
`process_reward`, `evaluation`, `health`, `assembly` (wires all parts), `evaluate_model` (`hone eval`, `hone generate`).
"""
