"""The process that runs reward functions for `hone.rewards.pool`, which starts it.

    hello    {"components": {name: {"reward", "options", "timeout_s"}}}   --> {"concurrent": [name, ...],
                                                             "needs_ground_truth", "whole_groups": ...} or {"error"}
    request  {"component": name, "items": [[response, role, ground_truth, row], ...]}
    reply    {"item": i, "value", "parts", "seconds"}  or  {"item": i, "error", "late", "seconds"}    as each is done
             "printed" is there if the function printed something

For a component that scores whole groups, `response` and `role` are lists, and a reply has one answer for each entry:

    reply    {"item": i, "answers": [{"value", "parts"} or {"error"}, ...], "seconds"}

Functions run in the main thread, because some libraries need signals: plain ones one after another in the order of the
batch, coroutine functions of a batch together on one event loop. A process may hold half of the memory of the machine
(or of the container): a function that wants more fails alone.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import resource
import sys
import time
import zlib
from collections.abc import Mapping
from contextvars import copy_context
from typing import Any

from hone import machine
from hone.processes.frames import Frame
from hone.processes.request_loop import RequestLoop
from hone.rewards.base import BadReward, LoadedReward, describe, judge, judge_group, load_reward
from hone.rewards.binding import Case
from hone.rewards.hosting.printed import Printed, one_call, watch_output


def main() -> None:
    """Serve until hone closes the socket or is gone."""
    loop = RequestLoop()
    watch_output()
    limit_memory(machine.memory()[0] // 2)
    requests = loop.requests()
    with asyncio.Runner() as runner:
        worker = RewardWorker(loop, runner)
        if worker.load(next(requests).body["components"]):
            for request in requests:
                worker.serve(request)


class RewardWorker:
    """The loaded components of one process."""

    def __init__(self, loop: RequestLoop, runner: asyncio.Runner) -> None:
        self._loop = loop
        self._runner = runner
        self._rewards: dict[str, LoadedReward] = {}
        self._timeouts: dict[str, float] = {}

    def load(self, components: Mapping[str, Mapping[str, Any]]) -> bool:
        """Import every component's function; reply whether that worked."""
        try:
            for name, spec in components.items():
                self._rewards[name] = load_reward(name, spec["reward"], spec["options"])
                self._timeouts[name] = spec["timeout_s"]
        except BadReward as error:
            self._loop.loaded({"error": str(error)})
            return False
        rewards = self._rewards.values()
        self._loop.loaded({
            "concurrent": [one.name for one in rewards if one.concurrent],
            "needs_ground_truth": [one.name for one in rewards if one.binding.needs_ground_truth],
            "whole_groups": [one.name for one in rewards if one.binding.whole_group],
        })  # fmt: skip
        return True

    def serve(self, request: Frame) -> None:
        """Reply to every item of one batch."""
        reward, items = self._rewards[request.body["component"]], request.body["items"]
        if reward.concurrent:
            self._runner.run(self._serve_together(reward, request.batch, items))
            return
        for index, item in enumerate(items):
            answer = self._call(reward, item)
            self._loop.reply(request.batch, {"item": index, **answer})

    def _call(self, reward: LoadedReward, item: list[Any]) -> dict[str, Any]:
        _seed(item[0])
        began = time.perf_counter()
        with one_call() as printed:
            try:
                returned = reward.call(Case(*item))
                if inspect.isawaitable(returned):
                    returned = self._runner.run(_wait(returned), context=copy_context())
                answer = _verdict(reward, item, returned)
            except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: reported, never scored
                answer = {"error": describe(error)}
        return {**_with_printed(answer, printed), "seconds": time.perf_counter() - began}

    async def _serve_together(self, reward: LoadedReward, batch: int, items: list[list[Any]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, item in enumerate(items):
                tasks.create_task(self._serve_waiting(reward, batch, index, item))

    async def _serve_waiting(self, reward: LoadedReward, batch: int, index: int, item: list[Any]) -> None:
        began = time.perf_counter()
        deadline = asyncio.timeout(self._timeouts[reward.name])
        with one_call() as printed:
            try:
                async with deadline:
                    answer = _verdict(reward, item, await reward.call(Case(*item)))
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  as above
                late = deadline.expired()
                answer = {"error": "" if late else describe(error), "late": late}
        answer = _with_printed(answer, printed)
        self._loop.reply(batch, {"item": index, **answer, "seconds": time.perf_counter() - began})


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _verdict(reward: LoadedReward, item: list[Any], returned: Any) -> dict[str, Any]:
    if not reward.binding.whole_group:
        return _value(judge(returned))
    return {"answers": [_value(one) for one in judge_group(returned, len(item[0]))]}


def _with_printed(answer: dict[str, Any], printed: Printed) -> dict[str, Any]:
    """The answer with what its function printed; each answer of a group has all that the call printed."""
    text = str(printed)
    if not text:
        return answer
    if "answers" in answer:
        return {"answers": [{**one, "printed": text} for one in answer["answers"]]}
    return {**answer, "printed": text}


def _value(judged: tuple[float, dict[str, float]] | Exception) -> dict[str, Any]:
    if isinstance(judged, Exception):
        return {"error": describe(judged)}
    return {"value": judged[0], "parts": judged[1]}


def limit_memory(most_bytes: int) -> None:
    """Let allocations of this process fail beyond `most_bytes`, so that the kernel does not kill the trainer instead.

    Address space that is only reserved (CUDA reserves more than there is) does not count.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _seed(response: str | list[str]) -> None:
    """Seed the random numbers by the answer, so that they do not depend on the process and on earlier calls."""
    text = response if isinstance(response, str) else "\0".join(response)
    seed = zlib.crc32(text.encode("utf-8", "surrogatepass"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


if __name__ == "__main__":
    main()
