"""The server on the trainer's device: it takes a share of the requests, and gives it back when it has to rest."""

import asyncio
from dataclasses import replace

import pytest

from hone.rollout.lending import LentServer
from hone.rollout.router import Router
from hone.rollout.settings import RolloutConfig
from hone.schedule.seats import Standing, moves
from hone.types import GenerationRequest
from tests.rollout.test_router import WANTED, Mortal, steps


@pytest.fixture
def lending(tiny, tokenizer):
    """`lending(**settings)`: a router, its one replica, and another one that is lent."""

    def make(**settings):
        model, order = tiny("qwen3"), []
        own, lent = (Mortal(model, tokenizer, number, order) for number in range(2))
        router = Router([own], RolloutConfig(**settings), tokenizer)

        async def restore(engine):
            await engine.update_weights(model.state_dict().items(), 0)
            return True

        router.restore_with(restore)
        return router, own, lent, LentServer(router, lent, 1, 5.0)

    return make


async def begin(server, lent):
    """Its start; a mortal runs already, and has weights."""
    await lent.sleep(1)
    server._router.pool.add(lent, lent=True)


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


def running(router, prompts=4):
    """Two requests for each of some prompts."""
    wanted = [(f"1/{prompt}/{sample}/0", (9, 10 + prompt)) for prompt in range(prompts) for sample in range(2)]
    return [asyncio.create_task(router.generate(GenerationRequest(one, tokens, WANTED))) for one, tokens in wanted]


def test_it_takes_half_of_the_prompts_and_gives_back_what_it_has_not_ended(lending, finish):
    router, own, lent, server = lending()
    alone = [finish(own.generate(GenerationRequest(f"x{n}", (9, 10 + n), WANTED))).token_ids for n in range(4)]
    own.seen.clear()

    async def story():
        await begin(server, lent)
        tasks = running(router)
        await until(lambda: len(own.seen) == 8)
        await steps(5)
        await server.wake()
        await until(lambda: len(lent.seen) == 4)
        await steps(5)
        await server.rest()
        assert router.pool.of(lent).state == "asleep"
        return [one.token_ids for one in await asyncio.gather(*tasks)]

    found = finish(story())
    assert found == [tokens for tokens in alone for _ in range(2)]
    prompts = {tokens[:2] for _, tokens, _ in lent.seen}
    assert len(prompts) == 2, "whole prompts, so that each is prefilled once"
    assert any(len(tokens) > 2 for _, tokens, _ in lent.seen), "they went on where they were"
    again = [tokens for request, tokens, _ in own.seen if request.count("+") and tokens[:2] in prompts]
    assert len(again) == 4, "and came back"
    metrics = router.metrics()
    assert 0 < metrics["rollout/lent_tokens"].value < metrics["rollout/tokens"].value
    assert server.metrics()["perf/lent_s"].value > 0


def test_requests_that_wait_for_a_seat_come_to_it_and_no_other_is_stopped(lending, finish):
    router, own, lent, server = lending(requests_per_replica=2)

    async def story():
        await begin(server, lent)
        tasks = running(router)
        await until(lambda: len(own.seen) == 2)
        await server.wake()
        await until(lambda: len(lent.seen) == 2)
        await asyncio.gather(*tasks)
        await server.rest()

    finish(story())
    assert not any(request.count("+") for request, _, _ in (*own.seen, *lent.seen))


def test_a_request_that_gets_a_seat_in_the_moment_of_its_rest_goes_elsewhere(lending, finish):
    """The seat is given, and the request has not been sent when the server begins to sleep."""
    router, own, lent, server = lending(requests_per_replica=2)

    async def story():
        await begin(server, lent)
        tasks = running(router)
        await until(lambda: len(own.seen) == 2)
        await lent.wake_up()
        replica = router.pool.of(lent)
        replica.state = "serving"
        router.seats.hand_out()
        assert len(replica.running) == 2
        await server.rest()
        assert [len(one.token_ids) for one in await asyncio.gather(*tasks)] == [WANTED.max_tokens] * 8
        assert not replica.running

    finish(story())
    assert lent.seen == []


def test_while_it_sleeps_it_gets_nothing(lending, finish):
    router, _, lent, server = lending()

    async def story():
        await begin(server, lent)
        await asyncio.gather(*running(router))
        await server.wake()
        await server.rest()
        await asyncio.gather(*running(router))

    finish(story())
    assert lent.seen == []
    assert router.metrics()["rollout/replicas_serving"].value == 1


@pytest.mark.parametrize("when", ["awake", "asleep"])
def test_one_that_died_is_started_when_it_is_needed_and_nobody_notices(lending, finish, when):
    router, own, lent, server = lending()

    async def story():
        await begin(server, lent)
        tasks = running(router)
        await until(lambda: len(own.seen) == 8)
        if when == "asleep":
            await lent.die()
        await server.wake()
        if when == "awake":
            await until(lambda: len(lent.seen) == 4)
            await lent.die()
        await until(lambda: lent.starts == 1)
        await until(lambda: router.pool.of(lent).state == "serving")
        await server.rest()
        found = [one.token_ids for one in await asyncio.gather(*tasks)]
        await server.wake()
        await server.rest()
        return found

    found = finish(story())
    alone = [finish(own.generate(GenerationRequest(f"x{n}", (9, 10 + n), WANTED))).token_ids for n in range(4)]
    assert found == [tokens for tokens in alone for _ in range(2)]
    assert lent.starts == 1, "it slept well afterwards"


def test_one_that_is_being_started_when_the_trainer_comes_back_is_ended(lending, finish):
    """Else it would take the memory that training needs."""
    router, _, lent, server = lending()
    started = asyncio.Event()

    async def start():
        lent.alive = True
        started.set()
        await asyncio.Event().wait()

    lent.start = start

    async def story():
        await begin(server, lent)
        await lent.die()
        await server.wake()
        await started.wait()
        await server.rest()

    finish(story())
    assert not lent.alive
    assert router.pool.of(lent).state == "asleep"


def test_it_does_not_leave_and_is_not_the_one_that_remains(lending, finish):
    router, _, lent, server = lending()

    async def story(name):
        await router.pool.retire(name, 1.0)

    finish(begin(server, lent))
    finish(server.wake())
    with pytest.raises(ValueError, match=r"mortal-1 is on the trainer's device \(asynchrony.lend_trainer\)"):
        finish(story("mortal-1"))
    with pytest.raises(ValueError, match="mortal-0 is the last replica"):
        finish(story("mortal-0"))
    finish(server.rest())


def test_no_draw_is_left_to_a_server_that_may_rest_at_any_moment():
    held, kept = [(1, 1), (2, 2)], [1, 2]
    own, other = Standing("own", 1), Standing("other", 1)
    assert moves([own, other], [(2, 2)], held, kept) == {"own": 2}
    assert moves([own, replace(other, lent=True)], [(2, 2)], held, kept) == {"other": 2}
    assert moves([own, replace(other, lent=True, version=2)], [], held, kept) == {}


def test_weights_that_are_sent_to_it_for_too_long_are_an_error_with_its_name(lending, finish):
    router, _, lent, server = lending()
    server._timeout_s = 0.01

    async def story():
        await begin(server, lent)
        await server.wake()
        with router.updating([lent]):
            await server.rest()

    with pytest.raises(TimeoutError, match=r"the device of mortal-1 back .* still being sent to it after 0.01 s"):
        finish(story())
