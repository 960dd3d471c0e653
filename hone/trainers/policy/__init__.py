"""Reinforcement learning.

In reading order: `settings`, `trainer` (a step), `supply` (the groups of a step), `feed` (groups in draw order, in
turns with training or ahead of it), `collection` (prompts to scored groups), `streaming` (a step that trains while it
collects), `generation` (rollout engine, environments, rewards), `annotators` (what adds fields to a batch), `teachers`,
`budgets` (tokens that models read at once), `evaluation`, `group_metrics`, `health`; `checks` (before
anything starts), `assembly` (wires all parts), `evaluate_model` (`hone eval`).
"""
