"""Processes that run reward functions or a reward model, and the deadline of every call.

    submit --> waiting jobs, by component --take a batch--> thread 0 <--frames--> worker process 0
                                       \\----------------> thread 1 <--frames--> worker process 1

Each thread owns one process, and the process has one batch at a time. A plain function's items run one after another,
so the first unanswered item is the one that is running: its deadline starts with the answer before it, and it is to
blame if the process dies; what was behind it goes back to the front of the queue. A coroutine function's items (and a
reward model's) run together, so each has the deadline of the batch; if the process dies under several, each is run
again alone.
A killed or dead process is replaced before the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hone.config import ConfigError
from hone.rewards.frames import encode, encode_value, frame
from hone.rewards.process import MODULE, WorkerDied, WorkerProcess
from hone.rewards.settings import RewardConfig

LOG = logging.getLogger("hone.rewards")
START_TIMEOUT_S = 120.0  # importing the reward functions, on a busy machine
RESTARTS = 3  # attempts to replace a process before its thread gives up
LARGEST_BATCH = 64
GRACE_S = 2.0  # a worker ends late coroutines itself; this much later its event loop is taken to be blocked


class PoolClosed(RuntimeError):
    """The pool was closed, or lost all its processes, with this call unanswered."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call: a value with sub-components, or an error (`late`: no answer before the deadline)."""

    value: float = 0.0  # meaningful only without an error
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    late: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hosting:
    """What the processes of a pool run, and how many of them there are."""

    components: Mapping[str, Mapping[str, Any]]  # name -> what a process is told of it; `timeout_s` is the deadline
    workers: int
    module: str = MODULE
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = START_TIMEOUT_S
    budget: int | None = None  # cost of a batch at most; None: the processes share the queue evenly


def functions(config: RewardConfig) -> Hosting:
    """The components that are functions, in processes that they share."""
    components = {
        name: {"reward": part.reward, "options": dict(part.options), "timeout_s": part.timeout_s}
        for name, part in config.components.items()
        if part.model is None
    }
    return Hosting(components, config.workers)


@dataclass(slots=True)
class _Job:
    component: str
    item: str  # JSON
    future: Future[Outcome]
    order: int
    cost: int
    alone: bool = False


class RewardPool:
    """`workers` processes shared by all components. Methods may be called from any thread."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self._components = hosting.components
        self._workers = hosting.workers
        self._waiting: dict[str, deque[_Job]] = {name: deque() for name in self._components}
        self._concurrent: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, WorkerProcess] = {}
        self._serving = hosting.workers
        self._closed = ""  # why no call will be answered any more
        self._submitted = 0
        self.restarts = 0

    def start(self) -> None:
        """Start the processes, all at once, and wait until each has imported every function.

        Raises ConfigError if a function cannot be loaded or does not take its options, RuntimeError if a process dies
        or is not ready in time.
        """
        ready: list[Future[None]] = [Future() for _ in range(self._workers)]
        for index, future in enumerate(ready):
            thread = threading.Thread(target=self._serve, args=(index, future), name=f"reward-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            for future in ready:
                future.result(self._hosting.start_timeout_s + GRACE_S)
        except BaseException:
            self.close()
            raise

    def submit(self, component: str, response: str, case: str) -> Future[Outcome]:
        """Ask for one value; `case` is `encode_case(ground_truth, row)`. The future never waits without end."""
        return self.submit_item(component, f"[{encode_value(response)}, {case}]", 1)

    def submit_item(self, component: str, item: str, cost: int) -> Future[Outcome]:
        """Ask for one value of what `item` (JSON) holds; a batch of several costs no more than the pool's budget."""
        future: Future[Outcome] = Future()
        with self._changed:
            if self._closed or not self._threads:
                raise PoolClosed(self._closed or "the reward processes were not started")
            job = _Job(component, item, future, self._submitted, cost)
            self._submitted += 1
            self._waiting[component].append(job)
            self._changed.notify()
        return future

    def close(self) -> None:
        """End all processes; calls that are still unanswered raise PoolClosed."""
        self._give_up("the reward processes were closed")
        for process in list(self._processes.values()):
            process.stop()  # its thread sees the end of the output, and cleans up
        for thread in self._threads:
            thread.join(START_TIMEOUT_S)

    # ---------------------------------------------------------------------------------- the thread of one process

    def _serve(self, index: int, ready: Future[None]) -> None:
        """Consumes batches; waits for jobs (woken by `submit` and `close`) and for its process (deadline per item)."""
        try:
            self._launch(index)
        except Exception as error:  # noqa: BLE001  raised where it is waited for, in `start`
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while batch := self._take():
                if not self._run(self._processes[index], batch):
                    self._replace(index)
        except Exception as error:  # noqa: BLE001  whatever ends this thread, nobody may be left waiting for it
            self._lost(error)
        finally:
            self._kill(index)

    def _launch(self, index: int) -> None:
        """Start process `index` and wait until it has imported the functions."""
        hosting = self._hosting
        process = WorkerProcess(hosting.module, hosting.environment)
        self._processes[index] = process
        try:
            process.send(encode({"components": self._components}))
            messages = process.receive(hosting.start_timeout_s)
            if not messages:
                raise WorkerDied(
                    f"a reward process had not loaded {', '.join(self._components)} after {hosting.start_timeout_s:g} s"
                )
            if "error" in messages[0]:
                raise ConfigError(messages[0]["error"])
            self._concurrent = frozenset(messages[0]["concurrent"])
        except BaseException:
            self._kill(index)
            raise

    def _replace(self, index: int) -> None:
        self._kill(index)
        for attempt in range(1, RESTARTS + 1):
            if self._closed:
                return
            self.restarts += 1
            try:
                self._launch(index)
                return
            except (ConfigError, OSError, WorkerDied) as error:
                LOG.warning("reward process %d could not be replaced (attempt %d): %s", index, attempt, error)
                if attempt == RESTARTS:
                    raise

    def _kill(self, index: int) -> None:
        process = self._processes.pop(index, None)
        if process is not None:
            process.kill()

    def _lost(self, error: Exception) -> None:
        """One thread less; with the last one, every call is answered with the reason."""
        with self._changed:
            self._serving -= 1
            last = self._serving == 0
        LOG.error("a reward process is gone for good: %s", error)
        if last:
            self._give_up(f"all reward processes are gone and cannot be replaced: {error}")

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            left = [job for jobs in self._waiting.values() for job in jobs]
            for jobs in self._waiting.values():
                jobs.clear()
            self._changed.notify_all()
        self._refuse(left)

    def _refuse(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.future.running() or job.future.set_running_or_notify_cancel():
                job.future.set_exception(PoolClosed(self._closed))

    # ------------------------------------------------------------------------------------------------ one batch

    def _take(self) -> list[_Job]:
        """The next batch, of the component that waits longest; empty when the pool is closed."""
        with self._changed:
            while not self._closed:
                jobs = min((j for j in self._waiting.values() if j), key=lambda j: j[0].order, default=None)
                batch = self._cut(jobs) if jobs else []
                if batch:
                    return batch
                if jobs is None:
                    self._changed.wait()
        return []

    def _cut(self, jobs: deque[_Job]) -> list[_Job]:
        """A share of the queue, so that several processes end together; cancelled calls fall out."""
        shares = self._workers if jobs[0].component in self._concurrent else 2 * self._workers
        budget = self._hosting.budget
        size = max(1, min(LARGEST_BATCH, -(-len(jobs) // shares))) if budget is None else len(jobs)
        size = 1 if jobs[0].alone else size
        batch: list[_Job] = []
        cost = 0
        while jobs and len(batch) < size and (not batch or not jobs[0].alone):
            if batch and budget is not None and cost + jobs[0].cost > budget:
                break
            job = jobs.popleft()
            if job.future.running() or job.future.set_running_or_notify_cancel():
                batch.append(job)
                cost += job.cost
        return batch

    def _run(self, process: WorkerProcess, batch: Sequence[_Job]) -> bool:
        """Answer every job of the batch, or put it back. False: the process must be replaced."""
        component = batch[0].component
        timeout_s: float = self._components[component]["timeout_s"]
        together = component in self._concurrent
        left = dict(enumerate(batch))
        try:
            items = ", ".join(job.item for job in batch)
            process.send(frame(f'{{"component": {encode_value(component)}, "items": [{items}]}}'))
            deadline = time.monotonic() + timeout_s + (GRACE_S if together else 0.0)
            while left:
                messages = process.receive(deadline - time.monotonic())
                if not messages:
                    self._blame_late(left, timeout_s, together)
                    return False
                for message in messages:
                    left.pop(message["item"]).future.set_result(_outcome(message, timeout_s))
                if not together:
                    deadline = time.monotonic() + timeout_s
        except WorkerDied as death:
            self._blame_death(left, str(death), together)
            return False
        except Exception:
            self._put_back(list(left.values()))
            raise
        return True

    def _blame_late(self, left: dict[int, _Job], timeout_s: float, together: bool) -> None:
        late = list(left) if together else [min(left)]
        for index in late:
            left.pop(index).future.set_result(_late(timeout_s))
        self._put_back(list(left.values()))

    def _blame_death(self, left: dict[int, _Job], reason: str, together: bool) -> None:
        if self._closed:
            self._refuse(list(left.values()))
            return
        if together and len(left) > 1:
            for job in left.values():
                job.alone = True
        elif left:
            left.pop(min(left)).future.set_result(Outcome(error=reason))
        self._put_back(list(left.values()))

    def _put_back(self, jobs: Sequence[_Job]) -> None:
        with self._changed:
            if not self._closed:
                for job in reversed(jobs):
                    self._waiting[job.component].appendleft(job)
                self._changed.notify_all()
                return
        self._refuse(jobs)


def encode_case(ground_truth: Any, row: Mapping[str, Any]) -> str:
    """What an answer is judged against, encoded once for all answers to one prompt.

    Raises TypeError naming the column that cannot be sent to a process.
    """
    columns = []
    for name, value in row.items():
        try:
            columns.append(f"{encode_value(str(name))}: {encode_value(value)}")
        except (TypeError, ValueError) as error:
            raise TypeError(f"column {name!r} of the row: {error}") from error
    return f"{encode_value(ground_truth)}, {{{', '.join(columns)}}}"


def _outcome(message: Mapping[str, Any], timeout_s: float) -> Outcome:
    seconds = float(message["seconds"])
    if message.get("late"):
        return _late(timeout_s)
    if "error" in message:
        return Outcome(error=message["error"], seconds=seconds)
    return Outcome(value=message["value"], parts=message["parts"], seconds=seconds)


def _late(timeout_s: float) -> Outcome:
    return Outcome(error=f"no answer within {timeout_s:g} s", late=True, seconds=timeout_s)
