"""The built-in engine's server, where new weights arrive in the middle of answers in every run, whatever the load.

With staleness 1, draw d is trained in step d // PER_STEP + 1, after version d // PER_STEP has been published. A request
of this draw waits until all requests of its step have arrived and all requests of the step before have ended. Then it
gets its first tokens, and the rest when the server has that version. New weights wait until all requests that need them
have arrived, and every running request has a token.
"""

import asyncio
import sys
from collections import Counter
from pathlib import Path

from hone.rollout.builtin.scheduler import Scheduler
from hone.rollout.servers.builtin import BuiltinServer
from hone.workers.inside import builtin

STEPS = 5  # of the run
PER_STEP, SAMPLES = 4, 4  # of its `update`
OF_STEP = PER_STEP * SAMPLES
PATIENCE_S = 120.0
answer, pause, step = builtin.EngineApp._generate, builtin.EngineApp._pause, Scheduler.step
ended = Counter()  # version -> requests that have ended of those that waited for it
arrived = Counter()  # version -> requests that have arrived of those that wait for it
held = set()


class Gated(BuiltinServer):
    """The adapter; a test registers it as `gated`."""

    program = (str(Path(__file__)),)


def due(request_id):
    """The version that a request waits for."""
    return int(request_id.split("/")[1]) // PER_STEP


async def until(happened):
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.001)


async def answer_in_turn(app, asked):
    if asked["sampling"]["temperature"] == 0:  # of an evaluation
        return await answer(app, asked)
    request, engine = asked["request_id"], app._engine
    version = due(request)
    arrived[version] += 1
    held.add(request)
    try:
        await until(lambda: version <= engine.weight_version or ended[engine.weight_version] == OF_STEP)
        await until(lambda: arrived[version] == OF_STEP)
    finally:
        held.discard(request)
    found = await answer(app, asked)
    ended[version] += 1
    return found


def has_token(scheduler, request):
    return bool(request.tokens or scheduler.batch._host.produced[request.row])


def step_if_due(scheduler):
    batch = scheduler.batch
    waits = [due(one.request_id) > batch.weight_version and has_token(scheduler, one) for one in batch.running]
    if scheduler._queue or not waits or not all(waits) or any(one.sampling.temperature == 0 for one in batch.running):
        step(scheduler)


async def pause_when_begun(app, body):
    scheduler, new = app._engine._scheduler, app._engine.weight_version + 1
    needed = OF_STEP if 0 < new < STEPS else 0
    await until(
        lambda: (
            arrived[new] >= needed
            and not (held or scheduler._queue)
            and all(has_token(scheduler, one) for one in scheduler.batch.running)
        )
    )
    return await pause(app, body)


if __name__ == "__main__":
    builtin.EngineApp._generate = answer_in_turn
    builtin.EngineApp._pause = pause_when_begun
    Scheduler.step = step_if_due
    builtin.main(sys.argv[1:])
