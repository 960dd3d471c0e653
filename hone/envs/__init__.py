"""Environments: what a policy talks to, and the loop that plays episodes."""

from hone.registry import Registry

ENVS = Registry("environment", {"chat": "hone.envs.chat:ChatEnv"})
