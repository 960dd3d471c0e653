"""Reinforcement learning.

In reading order: `settings`, `trainer` (collect, update), `streaming` (a step that trains while it collects), `feed`
(groups in draw order, in turns with training or ahead of it), `collection` (prompts to scored groups), `generation`
(rollout engine, environments, rewards), `annotators` (what adds fields to a batch), `teachers` with
`teacher_placement`, `process_reward`, `evaluation`, `group_metrics`, `health`; `checks` (before anything starts),
`assembly` (wires all parts), `evaluate_model` (`hone eval`, `hone generate`).
"""
