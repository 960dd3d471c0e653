"""The loop of a run: on the caller's thread until something is started on it, then on a thread of its own."""

import _thread
import asyncio
import sys
import threading

import pytest
import torch

from hone.runtime import foreign_tasks
from hone.trainers.run.event_loop import EventLoop

WAIT_S = 30.0  # for events that come at once


@pytest.fixture
def loop():
    loop = EventLoop()
    yield loop
    loop.close()


async def thread_name():
    return threading.current_thread()


def test_a_synchronous_run_computes_on_the_callers_thread(loop):
    with torch.no_grad():  # a property of the thread
        assert loop.run(thread_name()) is threading.current_thread()

        async def records_gradients():
            return torch.is_grad_enabled()

        assert loop.run(records_gradients()) is False


def test_started_coroutines_go_on_between_two_calls_of_run(loop):
    made = loop.run(asyncio.sleep(0, asyncio.Event))()  # of before the loop moved

    async def waits():
        await made.wait()
        return threading.current_thread()

    async def sets():
        made.set()
        return threading.current_thread()

    future = loop.start(waits())
    own = loop.run(sets())
    assert future.result(WAIT_S) is own is not threading.current_thread()


def test_coroutines_begin_in_the_order_of_the_calls(loop):
    begun = []

    async def note(number):
        begun.append(number)

    futures = [loop.start(note(number)) for number in range(20)]
    loop.run(note(20))
    assert begun == list(range(21))
    assert all(future.done() for future in futures)


def test_an_error_reaches_the_one_who_asked(loop):
    async def fails(text):
        raise ValueError(text)

    future = loop.start(fails("started"))
    with pytest.raises(ValueError, match="run"):
        loop.run(fails("run"))
    with pytest.raises(ValueError, match="started"):
        future.result(WAIT_S)


def test_an_interrupt_ends_the_coroutine_that_run_waits_for_and_no_other(loop):
    ended, released = [], loop.run(asyncio.sleep(0, asyncio.Event))()

    async def other():
        await released.wait()
        return "goes on"

    async def interrupted():
        try:
            _thread.interrupt_main()
            await asyncio.sleep(WAIT_S)
        finally:
            await asyncio.sleep(0.05)  # what it cleans up takes time
            ended.append(True)

    async def release():
        released.set()

    future = loop.start(other())
    with pytest.raises(KeyboardInterrupt):
        loop.run(interrupted())
    assert ended == [True]
    loop.run(release())
    assert future.result(WAIT_S) == "goes on"


@pytest.mark.parametrize("left", [KeyboardInterrupt, SystemExit])
def test_what_leaves_the_loop_out_of_a_task_ends_what_run_waited_for_and_not_the_loop(loop, left):
    ended = []

    async def leaves():
        raise left

    async def waits():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leaves())
            tasks.create_task(asyncio.sleep(WAIT_S))

    async def waits_for_it():
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(waits())
        finally:
            await asyncio.sleep(0.05)  # what it cleans up takes time
            ended.append(True)

    with pytest.raises(RuntimeError if left is SystemExit else KeyboardInterrupt):
        loop.run(waits_for_it())
    assert ended == [True]
    assert loop._runner.get_loop().run_until_complete(asyncio.sleep(0.01, "closing")) == "closing"
    assert [loop.run(asyncio.sleep(0, number)) for number in range(4)] == [0, 1, 2, 3]


def test_sys_exit_of_foreign_code_is_an_error_and_ends_neither_loop_nor_process(loop):
    async def leaves():
        sys.exit(0)

    async def lets_another_leave():
        await asyncio.create_task(leaves())

    for coroutine in (leaves, lets_another_leave):
        with pytest.raises(RuntimeError, match=r"sys.exit\(0\) was called on the event loop"):
            loop.run(coroutine())  # on the caller's thread
    loop.start(asyncio.sleep(0)).result(WAIT_S)
    for coroutine in (leaves, lets_another_leave):
        with pytest.raises(RuntimeError, match=r"sys.exit\(0\) was called on the event loop"):
            loop.run(coroutine())
    assert loop.run(asyncio.sleep(0, "goes on")) == "goes on"


def test_a_loop_that_foreign_code_blocks_does_not_respond(monkeypatch):
    monkeypatch.setattr(foreign_tasks, "RESPONDS_S", 0.3)
    loop, go_on = EventLoop(), threading.Event()
    assert loop.responds

    async def blocks():
        go_on.wait(WAIT_S)

    blocked = loop.start(blocks())
    assert not loop.responds
    go_on.set()
    blocked.result(WAIT_S)
    assert loop.responds
    loop.close()


def test_a_coroutine_that_would_wait_for_itself_is_an_error(loop):
    async def waits_for_itself():
        loop.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="use await"):
        loop.start(waits_for_itself()).result(WAIT_S)


def test_closing_cancels_what_was_started():
    loop, cancelled = EventLoop(), []

    async def never():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    future = loop.start(never())
    loop.run(asyncio.sleep(0))
    loop.close()
    assert cancelled == [True]
    assert future.cancelled()
