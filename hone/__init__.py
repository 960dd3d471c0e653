"""hone: reinforcement learning and fine-tuning of language models after pre-training."""

__version__ = "0.1.0"
