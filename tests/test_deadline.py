"""Deadlines of episodes: the wait for a seat does not count, everything else does."""

import asyncio

import pytest

from hone.deadline import Deadline, SeatWait


def test_a_wait_for_a_seat_does_not_count():
    async def episode():
        async with Deadline(0.01) as deadline:
            with SeatWait():
                assert deadline.stands_still
                assert deadline.when() is None
                await asyncio.sleep(0.1)
            return deadline

    deadline = asyncio.run(episode())
    assert not deadline.expired()
    assert not deadline.stands_still


def test_what_comes_after_the_seat_counts():
    async def episode():
        async with Deadline(0.01):
            with SeatWait():
                await asyncio.sleep(0)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(episode())


def test_the_clock_goes_on_when_the_last_of_several_requests_has_its_seat():
    async def episode():
        async with Deadline(3600) as deadline:
            first, second = SeatWait(), SeatWait()
            seen = []
            for change in (first.begin, second.begin, first.begin, first.end, first.end, second.end):
                change()
                seen.append(deadline.stands_still)
            left = deadline.when() - asyncio.get_running_loop().time()
            return seen, left

    seen, left = asyncio.run(episode())
    assert seen == [True, True, True, True, True, False]
    assert 0 < left <= 3600


def test_a_task_that_the_episode_did_not_start_finds_its_deadline():
    async def episode():
        seats = asyncio.Queue()

        async def generate(request):
            with SeatWait():
                return request, await seats.get()

        deadline = Deadline(3600)
        serving = asyncio.create_task(deadline.over(generate)("7"))
        async with deadline:
            await asyncio.sleep(0)
            waited = deadline.stands_still
            seats.put_nowait("seat")
            return waited, await serving, deadline.stands_still

    assert asyncio.run(episode()) == (True, ("7", "seat"), False)


def test_a_wait_that_outlives_its_episode_changes_nothing():
    async def episode():
        async with Deadline(3600) as deadline:
            wait = SeatWait()
            wait.begin()
        wait.end()
        SeatWait().begin()  # outside of an episode there is no deadline
        return deadline.expired()

    assert not asyncio.run(episode())
