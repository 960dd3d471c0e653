"""A program that episodes share is started again only so often."""

import asyncio

import pytest

from hone.envs.base import ToolLost
from hone.envs.mcp.restarted import RESTARTS, RestartedProgram


class Program:
    lost = False

    async def close(self):
        self.lost = True


def starts_of(monkeypatch, outcomes, calls):
    """How often a program is started in so many calls, when its starts end as `outcomes` say: a Program or None."""
    monkeypatch.setattr("hone.processes.restarts.FIRST_PAUSE_S", 0.001)
    started = []

    async def start():
        started.append(outcomes(len(started)))
        if started[-1] is None:
            raise ToolLost("no start")
        return started[-1]

    async def story():
        program = RestartedProgram("the program", start)
        for _ in range(calls):
            try:
                (await program.running()).lost = True
            except ToolLost as error:
                found.append(str(error))

    found = []
    asyncio.run(asyncio.wait_for(story(), 60))
    return len(started), found


@pytest.mark.parametrize("first", [True, False])
def test_every_start_but_the_first_counts_also_one_that_fails(monkeypatch, first):
    starts, errors = starts_of(monkeypatch, lambda number: Program() if first and number == 0 else None, 12)
    assert starts == 1 + RESTARTS
    assert errors[-1] == "the program ended again and again, and is given up after 5 restarts within 120 s"
    assert errors.count("no start") == RESTARTS + (not first)


def test_a_program_that_dies_again_and_again_is_given_up(monkeypatch):
    starts, errors = starts_of(monkeypatch, lambda number: Program(), 12)
    assert (starts, len(errors)) == (1 + RESTARTS, 6)


def test_a_program_that_runs_is_started_once():
    async def story():
        program = RestartedProgram("the program", start)
        found = await asyncio.gather(*(program.running() for _ in range(20)))
        await program.close()
        return found

    async def start():
        await asyncio.sleep(0)
        return Program()

    (one,) = set(asyncio.run(asyncio.wait_for(story(), 60)))
    assert one.lost
