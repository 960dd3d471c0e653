"""Environments with one fault each, for `hone env check`."""

import asyncio
import itertools
import math
import subprocess
import sys
import threading
from dataclasses import replace

from hone.envs.base import Start, StepResult
from hone.types import Status

COUNT = itertools.count()
RELEASE = threading.Event()
LEFT = []


def spec(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "It works.", "parameters": parameters}}


class Good:
    """Asks twice; done after the second answer."""

    tools = ()

    def __init__(self, prompt, sample, settings):
        self.prompt = prompt
        self.turns = 0

    async def start(self):
        return Start(messages=self.prompt.messages, tools=self.tools)

    async def step(self, said, completion):
        self.turns += 1
        return StepResult(done=self.turns == 2, messages=(self.message(),), reward=self.reward())

    async def close(self):
        return None

    def message(self):
        return {"role": "user", "content": self.text()}

    def text(self):
        return "once more"

    def reward(self):
        return 0.5


class Unparsed(Good):
    tools = (spec("add", a={"type": "integer"}),)


class TwoOfOneName(Good):
    tools = (spec("add", a={"type": "integer"}), spec("add"))


class Untyped(Good):
    tools = (spec("add", a={"description": "a number"}),)


class Endless(Good):
    async def step(self, said, completion):
        return StepResult(done=False, messages=(self.message(),))


class Large(Good):
    def text(self):
        return "x" * 10_000_000


class Special(Good):
    def text(self):
        return "right<|im_end|>"


class RandomStart(Good):
    async def start(self):
        return Start(messages=({"role": "user", "content": str(next(COUNT))},))


class RandomStep(Good):
    def text(self):
        return str(next(COUNT))


class Raises(Good):
    async def step(self, said, completion):
        raise ZeroDivisionError("by zero")


class Fails(Good):
    async def step(self, said, completion):
        return StepResult(done=True, status=Status.ENV_FAILED, error="the database is gone")


class Silent(Good):
    async def step(self, said, completion):
        return StepResult(done=False)


class Late(Good):
    async def start(self):
        await asyncio.Event().wait()


class Blocks(Good):
    async def start(self):
        RELEASE.wait(60)


class Returns(Good):
    async def start(self):
        return "a question"


class NoReward(Good):
    def reward(self):
        return math.nan


class Figures(Good):
    async def step(self, said, completion):
        return replace(await super().step(said, completion), metrics={"placed": 1.0})


class Speaks(Good):
    def message(self):
        return {"role": "assistant", "content": "I say"}


class Unclosed(Good):
    async def close(self):
        raise OSError("it is busy")


class Leaves(Good):
    async def start(self):
        LEFT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return await super().start()
