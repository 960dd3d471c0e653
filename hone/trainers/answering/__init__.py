"""Finished models that answer: `model` (a model and its rollout), `asking` (many prompts: `hone generate`), `chat`
(`hone chat`), `serving` (`hone serve`).
"""
