"""Reward functions of all tempers, as a user might write them. Referenced by the tests as file.py:function."""

import asyncio
import os
import random
import re
import subprocess
import sys
import time


def number(response, ground_truth, row):
    return float(row["n"])


def length(response, ground_truth, row, scale: float = 1.0):
    return len(response) * scale


def hungry(response, ground_truth, row):
    return len(bytearray(int(response))) > 0


def parts(response, ground_truth, row):
    return {"reward": 0.5, "format": 1, "length": len(response)}


def noisy(response, ground_truth, row):
    print("I print", response, flush=True)
    os.write(1, b"\x00\x00\x00\x02{}")
    print(sys.stdin.read())
    return 1


def drawn(response, ground_truth, row):
    return random.random() + sum(ord(letter) for letter in "".join({"alpha", "beta", "gamma", row["word"]})[:3])


def temper(response, ground_truth, row):
    """Does what the response says."""
    if response == "raise":
        raise RuntimeError("no verdict\non two lines")
    if response == "nan":
        return float("nan")
    if response == "inf":
        return {"reward": 1.0, "part": float("-inf")}
    if response == "none":
        return None
    if response == "text":
        return "1.0"
    if response == "keyless":
        return {"points": 1.0}
    if response == "exit":
        sys.exit("leaving")
    if response == "die":
        print("goodbye", file=sys.stderr)
        os._exit(3)
    if response == "sleep":
        time.sleep(600)
    if response == "spin":
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock for ever
    if response == "flood":
        while True:
            os.write(1, b"x" * 65536)
    if response == "fork" and os.fork() == 0:
        time.sleep(0.2)
        return 99.0
    if response == "slow":
        time.sleep(0.15)
    if response == "detached":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(row["pid_file"], "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if response == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(row["pid_file"], "w") as file:
            file.write(str(child.pid))
        child.wait()
    return 1.0


everybody = asyncio.Barrier(2)


async def waiting(response, ground_truth, row):
    await asyncio.sleep(0)
    return float(row["n"])


async def meeting(response, ground_truth, row):
    """Ends when another call is waiting too."""
    async with everybody:
        return float(row["n"])


async def async_temper(response, ground_truth, row):
    if response == "sleep":
        await asyncio.sleep(600)
    if response == "block":
        time.sleep(600)
    if response == "stubborn":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue
    await asyncio.sleep(0.01)
    return temper(response, ground_truth, row)


class Judge:
    async def __call__(self, response, ground_truth, row):
        await asyncio.sleep(0)
        return 0.25


judge = Judge()


def hidden_coroutine(response, ground_truth, row):
    return judge(response, ground_truth, row)


def shortest(responses: list[str], ground_truth, row):
    """1 for the shortest of the answers that are right, 0 for the others."""
    right = [len(one) for one in responses if str(ground_truth) in one]
    return [float(str(ground_truth) in one and len(one) == min(right)) for one in responses]


def ranked(responses, scale: float = 1.0):
    order = sorted(range(len(responses)), key=lambda place: len(responses[place]))
    return [{"reward": scale * order.index(place), "size": len(responses)} for place in range(len(responses))]


async def alike(ground_truth, responses):
    await asyncio.sleep(0)
    return [responses.count(one) for one in responses]


def group_temper(responses, row):
    """Does what the row's `mood` says."""
    if row["mood"] == "short":
        return [1.0] * (len(responses) - 1)
    if row["mood"] == "number":
        return 1.0
    if row["mood"] == "one":
        return [1.0, float("nan"), None, 2.0]
    return [temper(row["mood"], None, row) for _ in responses]


class Distinct:
    def __init__(self, bonus: float):
        self.bonus = bonus

    def __call__(self, responses, **kwargs):
        return [self.bonus * (responses.count(one) == 1) for one in responses]


GOALS = {"proposer": "?", "solver": "42"}


def goal_of_role(response, role):
    """Each role has its own goal."""
    return float(GOALS[role] in response)


class Handicap:
    """An object, called in hone's order, with the role behind."""

    def __init__(self, solver: float):
        self.points = {"proposer": 0.0, "solver": solver}

    async def __call__(self, response, ground_truth, row, role):
        return self.points[role]


def zero_sum(responses, roles):
    """The solvers get what they solve, the proposers the share that is left."""
    solved = [float("42" in one) for one, role in zip(responses, roles, strict=True) if role == "solver"]
    mean = sum(solved) / len(solved)
    return [float("42" in one) if role == "solver" else 1 - mean for one, role in zip(responses, roles, strict=True)]


def told_role(response, role):
    return len(role)
