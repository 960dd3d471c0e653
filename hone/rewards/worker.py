"""The process that runs reward functions: `python -m hone.rewards.worker PARENT_PID`, spoken to by `hone.rewards.pool`.

    stdin --frames--> listener thread --queue--> main thread: call, judge, answer --frames--> stdout (a private copy)

The functions run in the main thread (some libraries need signals), plain ones one after another in the order of the
batch, coroutine functions of a batch together on one event loop. Standard output is redirected to standard error
before any foreign code runs, so printing cannot disturb the protocol. The process ends when its input does, and is
killed by the kernel when its parent dies, even in the middle of a call.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import queue
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from hone.rewards.base import BadReward, LoadedReward, describe, judge, load_reward
from hone.rewards.frames import FrameBuffer, encode, write_all

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent closes the pipe or is gone."""
    sink, messages = connect()
    with asyncio.Runner() as runner:
        worker = RewardWorker(sink, runner)
        if worker.load(next(messages)["components"]):
            for batch in messages:
                worker.serve(batch)


def connect() -> tuple[int, Iterator[dict[str, Any]]]:
    """Where answers are written, and the messages as they come; the process ends with its parent and with its input."""
    die_with_parent(int(sys.argv[1]))
    source, sink = _claim_pipes()
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, inbox), daemon=True).start()
    return sink, _messages(inbox)


def _messages(inbox: queue.SimpleQueue[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while True:
        yield inbox.get()


def die_with_parent(parent: int) -> None:
    """SIGKILL at the parent's death: a call that holds the interpreter would not see the end of the input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked


def _claim_pipes() -> tuple[int, int]:
    """Private copies of stdin and stdout; the public ones become nothing and stderr."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, sink


def _listen(source: int, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    buffer = FrameBuffer()
    while data := os.read(source, 1 << 20):
        for message in buffer.feed(data):
            inbox.put(message)
    os._exit(0)


class RewardWorker:
    """The loaded components of one process, and the way back to hone."""

    def __init__(self, sink: int, runner: asyncio.Runner) -> None:
        self._sink = sink
        self._runner = runner
        self._rewards: dict[str, LoadedReward] = {}
        self._timeouts: dict[str, float] = {}

    def load(self, components: Mapping[str, Mapping[str, Any]]) -> bool:
        """Import every component's function; tell hone that we are ready, or why not."""
        try:
            for name, spec in components.items():
                self._rewards[name] = load_reward(name, spec["reward"], spec["options"])
                self._timeouts[name] = spec["timeout_s"]
        except BadReward as error:
            self._answer({"error": str(error)})
            return False
        self._answer({"ready": True, "concurrent": [r.name for r in self._rewards.values() if r.concurrent]})
        return True

    def serve(self, batch: Mapping[str, Any]) -> None:
        """Answer every item of one batch."""
        reward = self._rewards[batch["component"]]
        if reward.concurrent:
            self._runner.run(self._serve_together(reward, batch["items"]))
            return
        for index, item in enumerate(batch["items"]):
            self._serve_one(reward, index, item)

    def _serve_one(self, reward: LoadedReward, index: int, item: list[Any]) -> None:
        _seed(item[0])
        began = time.perf_counter()
        try:
            returned = reward.call(*item)
            if inspect.isawaitable(returned):
                returned = self._runner.run(_wait(returned))
            answer = _verdict(returned)
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: reported, never scored
            answer = {"error": describe(error)}
        self._answer({"item": index, **answer, "seconds": time.perf_counter() - began})

    async def _serve_together(self, reward: LoadedReward, items: list[list[Any]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, item in enumerate(items):
                tasks.create_task(self._serve_waiting(reward, index, item))

    async def _serve_waiting(self, reward: LoadedReward, index: int, item: list[Any]) -> None:
        began = time.perf_counter()
        deadline = asyncio.timeout(self._timeouts[reward.name])
        try:
            async with deadline:
                answer = _verdict(await reward.call(*item))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  as above
            late = deadline.expired()
            answer = {"error": "" if late else describe(error), "late": late}
        self._answer({"item": index, **answer, "seconds": time.perf_counter() - began})

    def _answer(self, message: Mapping[str, Any]) -> None:
        write_all(self._sink, encode(message))


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _verdict(returned: Any) -> dict[str, Any]:
    value, parts = judge(returned)
    return {"value": value, "parts": parts}


def _seed(response: str) -> None:
    """The same answer draws the same random numbers in whatever process, and after whatever calls, it is judged."""
    seed = zlib.crc32(response.encode("utf-8", "surrogatepass"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


if __name__ == "__main__":
    main()
