"""A taskset for the tests whose environment has two agents."""

import verifiers.v1 as vf
from second_guess import Letters


class Two(vf.EnvConfig):
    white: vf.AgentConfig = vf.AgentConfig()
    black: vf.AgentConfig = vf.AgentConfig()


class Match(vf.Env[Two]):
    async def run(self, task, agents):
        await agents.white.run(task)
        await agents.black.run(task)


__all__ = ["Letters", "Match"]
