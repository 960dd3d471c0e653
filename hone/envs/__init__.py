"""Environments: what a policy talks to, and the loop that plays episodes."""

from hone.registry import Entry, Registry

ENVS = Registry(
    "environment",
    {
        "agent": Entry("hone.envs.agent:load_program", "hone.envs.settings:AgentSettings"),
        "chat": "hone.envs.chat:ChatEnv",
    },
)
