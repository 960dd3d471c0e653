"""A taskset for the tests: say a letter. Who says another one reads `f`, and may guess again until max_turns."""

import asyncio
import os

import verifiers.v1 as vf


class Letter(vf.TaskData):
    answer: str
    kind: str = ""


class Guess(vf.Task[Letter]):
    async def setup(self, trace, runtime):
        if self.data.kind == "dies":
            os._exit(3)
        if self.data.kind == "no setup":
            raise OSError("the board is gone")

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if self.data.kind == "no score":
            raise ValueError("there is no judge")
        if self.data.kind == "slow score":
            await asyncio.sleep(600)
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=-0.5)
    async def late(self, trace) -> float:
        return float(trace.num_turns > 1)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


KINDS = ("", "dies", "no setup", "no score", "slow score")


class Letters(vf.Taskset[Guess]):
    def load(self):
        print("reading the letters")  # an environment may print
        for kind in KINDS:
            timeout = vf.TaskTimeout(scoring=0.5 if kind == "slow score" else None)
            letter = Letter(prompt="ab", system_prompt="c", answer="d", kind=kind, timeout=timeout)
            yield Guess(letter, self.config.task)


class GuessesConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guesses(vf.Env[GuessesConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as conversation:
            said = await conversation.turn()
            while not said.terminated and said.last_reply != task.data.answer:
                said = await conversation.turn("f")


__all__ = ["Guesses", "Letters"]
