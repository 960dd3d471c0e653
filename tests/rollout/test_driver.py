"""The engine on an event loop: failures reach everybody who waits, and nothing waits for nobody."""

import asyncio

import pytest
import torch

from hone.deadline import Deadline
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams

WANTED = SamplingParams(max_tokens=30, ignore_eos=True)


def test_a_failing_step_reaches_every_waiting_request_and_the_engine_goes_on(tiny, finish):
    """The fault is real: weights that are not finite."""
    model = tiny("qwen3")
    engine = BuiltinEngine(BuiltinSettings(slots=2), model)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in model.state_dict().items()}

    async def story():
        running = [asyncio.create_task(engine.generate(GenerationRequest(str(i), (9, 10), WANTED))) for i in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.update_weights(broken.items(), 4)
        found = await asyncio.gather(*running, return_exceptions=True)
        await engine.update_weights(model.state_dict().items(), 5)
        return found, await engine.generate(GenerationRequest("after", (9, 10), WANTED))

    found, after = finish(story())
    for i, error in enumerate(found):
        assert isinstance(error, RuntimeError)
        assert f"'{i}'" in str(error)
        assert "not finite (weight version 4)" in str(error)
    assert len(after.token_ids) == 30


def test_a_cancelled_caller_leaves_no_request_behind(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(slots=1), tiny("qwen3"))

    async def story():
        tasks = [asyncio.create_task(engine.generate(GenerationRequest(str(i), (9,), WANTED))) for i in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        tasks[0].cancel()  # running
        tasks[2].cancel()  # waiting
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return found, engine.metrics()["rollout/tokens"].value

    found, tokens = finish(story())
    assert isinstance(found[0], asyncio.CancelledError)
    assert isinstance(found[2], asyncio.CancelledError)
    assert len(found[1].token_ids) == 30
    assert tokens < 40  # 30, and the few that the first one had


def test_a_cancelled_driver_is_an_error_for_those_who_wait(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))

    async def story():
        running = asyncio.create_task(engine.generate(GenerationRequest("r", (9,), WANTED)))
        await asyncio.sleep(0)
        next(task for task in asyncio.all_tasks() if task.get_name().startswith("rollout")).cancel()
        with pytest.raises(RuntimeError, match="driver was cancelled"):
            await running
        return await engine.generate(GenerationRequest("again", (9,), WANTED))

    assert len(finish(story()).token_ids) == 30


def test_one_engine_serves_one_loop_after_another(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))
    found = [finish(engine.generate(GenerationRequest("r", (9,), WANTED))) for _ in range(3)]
    assert found[0] == found[1] == found[2]


def test_other_tasks_run_between_steps(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))

    async def story():
        turns = 0
        running = asyncio.create_task(engine.generate(GenerationRequest("r", (9,), WANTED)))
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert finish(story()) >= 30


def test_nothing_is_generated_without_weights(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny.config("qwen3"))
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="no weights yet"):
        finish(engine.generate(GenerationRequest("r", (9,), WANTED)))


def test_end_of_sequence_comes_from_the_generation_config(tiny, finish, tokenizer):
    model = tiny("qwen3")
    wanted = SamplingParams(max_tokens=100)
    free = finish(
        BuiltinEngine(BuiltinSettings(), model).generate(
            GenerationRequest("r", (9,), SamplingParams(100, ignore_eos=True))
        )
    )
    model.generation_config.eos_token_id = [free.token_ids[20], 103]
    found = finish(BuiltinEngine(BuiltinSettings(), model).generate(GenerationRequest("r", (9,), wanted)))
    ends = [i for i, token in enumerate(free.token_ids) if token in (free.token_ids[20], 103)]
    assert len(found.token_ids) == ends[0] + 1


def test_the_registry_knows_the_engine():
    assert ROLLOUT_ENGINES.get("builtin") is BuiltinEngine


def test_unknown_tags_and_levels_are_refused(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))
    with pytest.raises(ValueError, match="found 3"):
        finish(engine.sleep(3))
    with pytest.raises(ValueError, match="weight"):
        finish(engine.wake_up(("weight",)))


def test_the_wait_for_a_row_stops_the_deadline_of_an_episode(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(slots=1), tiny("qwen3"))

    async def episode(number, deadlines):
        async with Deadline(3600) as deadlines[number]:
            return await engine.generate(GenerationRequest(str(number), (9,), WANTED))

    async def story():
        deadlines, waiting = {}, []
        tasks = [asyncio.create_task(episode(number, deadlines)) for number in range(3)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            waiting.append("".join("w" if deadlines[number].stands_still else "." for number in range(3)))
        return [state for state, before in zip(waiting, [None, *waiting], strict=False) if state != before]

    assert finish(story()) == ["www", ".ww", "..w", "..."]


def test_a_request_that_its_episode_cancels_leaves_the_number_of_its_tokens(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(slots=1), tiny("qwen3"))

    async def episode(deadlines):
        async with Deadline(3600) as deadline:
            deadlines.append(deadline)
            await engine.generate(GenerationRequest("r", (9,), WANTED))

    async def story():
        deadlines = []
        task = asyncio.create_task(episode(deadlines))
        while engine.metrics()["rollout/tokens"].value == 0:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return deadlines[0].unfinished_tokens

    assert 1 <= finish(story()) < 30
