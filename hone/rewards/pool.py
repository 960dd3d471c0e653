"""Processes that run reward functions or a reward model, and the deadline of every call.

    submit --> waiting jobs, by component --take a batch--> thread 0 <--frames--> process 0
                                       \\----------------> thread 1 <--frames--> process 1

Each thread owns one process (`hone.processes.request_process`), and a process has one batch at a time. A plain function
scores the items of a batch one after another. The first item without a reply is the running one: its deadline starts
with the reply before it, and it fails if the process dies; the items behind it go back to the front of the queue. A
coroutine function (and a reward model) scores the items together, so each has the deadline of the batch; if the process
dies with several of them, each is run again alone. A killed or dead process is replaced before the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from hone.config import ConfigError
from hone.processes.frames import BrokenFrame, encode_value
from hone.processes.request_process import ChildLost, RequestProcess
from hone.processes.restarts import Restarts
from hone.rewards.hosting.lateness import LATE_IN_A_ROW, PROBES, tell, why_passed_over
from hone.rewards.hosting.processes import START_TIMEOUT_S, Hosting, Loaded
from hone.tracking.base import during
from hone.types import Trajectory

LOG = logging.getLogger("hone.rewards")
FAILED_STARTS, WINDOW_S = 2, 600.0  # a process whose start fails more often is not replaced
LARGEST_BATCH, LARGEST_BATCH_CHARACTERS = 64, 32 << 20
GRACE_S = 2.0  # a process ends late coroutines itself; after this long its event loop counts as blocked


class PoolClosed(RuntimeError):
    """The pool was closed or lost all its processes before this call had a result."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one call: a value with sub-components, or an error (`late`: no reply before the deadline)."""

    value: float = 0.0  # meaningful only without an error
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    late: bool = False
    seconds: float = 0.0
    printed: str = ""  # by the function
    answers: tuple[Outcome, ...] = ()  # of a call for a whole group: one for each answer, unless the call failed

    def of_each(self, answers: int) -> tuple[Outcome, ...]:
        """The outcome of each answer of a group; a call that failed has failed for all."""
        found = self.answers or (self,) * (answers if self.error else 1)
        wrong = replace(self, answers=(), error=f"its process gave {len(found)} values for {answers} answers")
        return found if len(found) == answers else (wrong,) * answers


Texts = str | Sequence[str]
"""The text of one answer, or the texts of all answers to a prompt."""

Call = tuple[str, Sequence[int], Future[Outcome]]
"""A component, the answers to a prompt that it is asked about, and its outcome."""


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
        self.components = hosting.components
        self._workers = hosting.workers
        self._waiting: dict[str, deque[_Job]] = {name: deque() for name in self.components}
        self._concurrent: frozenset[str] = frozenset()
        self.needs_ground_truth: tuple[str, ...] = ()  # components whose function must have one; known after `start`
        self.whole_groups: frozenset[str] = frozenset()  # components that score a group in one call; after `start`
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, RequestProcess] = {}
        self._failed_starts = [Restarts(FAILED_STARTS, WINDOW_S) for _ in range(hosting.workers)]
        self._serving = hosting.workers
        self._closed = ""  # why no call gets a result any more
        self._closing = threading.Event()
        self._submitted = 0
        self._calls: Counter[str] = Counter()  # of this step, by component
        self._ended: Counter[bool] = Counter()  # calls that were in time, and that were late
        self._late: Counter[str] = Counter()  # calls in a row that were late, by component
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
        threading.Thread(target=tell, args=(self._counts, self._closing), name="reward-progress", daemon=True).start()
        try:
            for future in ready:
                future.result(self._hosting.start_timeout_s + GRACE_S)
        except BaseException:
            self.close()
            raise

    def submit(self, component: str, response: Texts, role: Texts, case: str) -> Future[Outcome]:
        """Ask for one value; `case` is `encode_case(ground_truth, row)`. The future always ends.

        A component of `whole_groups` gets all answers to a prompt as `response`, and the role of each as `role`.
        """
        return self.submit_item(component, f"[{encode_value(response)}, {encode_value(role)}, {case}]", 1)

    def submit_item(self, component: str, item: str, cost: int) -> Future[Outcome]:
        """Ask for one value of `item` (JSON); a batch of several items costs no more than the pool's budget.

        Beyond the component's calls of one step, the outcome is an error.
        """
        future: Future[Outcome] = Future()
        most = self.components[component].get("most_calls")
        with self._changed:
            self._calls[component] += 1
            if most is not None and self._calls[component] > most:
                future.set_result(Outcome(error=f"its {most} calls of this step are spent (max_calls_per_step)"))
                return future
            if self._closed or not self._threads:
                raise PoolClosed(self._closed or "the reward processes were not started")
            job = _Job(component, item, future, self._submitted, cost)
            self._submitted += 1
            self._waiting[component].append(job)
            self._changed.notify()
        return future

    def end_step(self) -> None:
        """Count the calls of a step from 0 again."""
        with self._changed:
            self._calls.clear()
            self._late = Counter({name: min(late, LATE_IN_A_ROW - PROBES) for name, late in self._late.items()})

    def _counts(self) -> tuple[int, int, int]:
        """Calls so far, those that have ended, and those that were late."""
        with self._changed:
            return self._submitted, self._ended.total(), self._ended[True]

    def close(self) -> None:
        """End all processes; calls without a result raise PoolClosed."""
        self._give_up("the reward processes were closed")
        for process in list(self._processes.values()):
            process.stop()  # its thread sees the end of the socket, and cleans up
        for thread in self._threads:
            thread.join(START_TIMEOUT_S)

    # ---------------------------------------------------------------------------------- the thread of one process

    def _serve(self, index: int, ready: Future[None]) -> None:
        """Take batches until the pool closes; waits for jobs (`submit`, `close` wake it) and replies (deadlines)."""
        try:
            self._launch(index)
        except Exception as error:  # noqa: BLE001  `start` raises it
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while batch := self._take():
                if not self._processes[index].alive:  # it ended without a batch: no answer is to blame
                    self._replace(index)
                if not during(f"reward worker {index}", "reward", self._run, self._processes[index], batch):
                    self._replace(index)
        except Exception as error:  # noqa: BLE001  callers must not wait for a thread that ended
            self._lost(error)
        finally:
            self._kill(index)

    def _launch(self, index: int) -> None:
        """Start process `index` and wait until it has imported the functions."""
        hosting = self._hosting
        process = RequestProcess(hosting.child(index))
        self._processes[index] = process
        try:
            loaded = Loaded.of(process.hello({"components": self.components}, hosting.start_timeout_s))
            self._concurrent, self.whole_groups = loaded.concurrent, loaded.whole_groups
            self.needs_ground_truth = loaded.needs_ground_truth
        except BaseException:
            self._kill(index)
            raise

    def _replace(self, index: int) -> None:
        self._kill(index)
        failed = self._failed_starts[index]
        while not self._closed:
            self.restarts += 1
            try:
                self._launch(index)
                failed.worked()
                return
            except (ConfigError, OSError, ChildLost) as error:
                if self._closed:  # which killed it
                    return
                LOG.warning("reward process %d could not be replaced: %s", index, error)
                if not failed.take():
                    raise
                self._closing.wait(failed.pause_s)

    def _kill(self, index: int) -> None:
        if (process := self._processes.pop(index, None)) is not None:
            process.kill()

    def _lost(self, error: Exception) -> None:
        """Note that a thread has ended; when the last one has, every call fails with the reason."""
        with self._changed:
            self._serving -= 1
            last = self._serving == 0
        LOG.error("a reward process is gone for good: %s", error)
        if last:
            self._give_up(f"all reward processes are gone and cannot be replaced: {error}")

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            self._closing.set()
            left = [jobs.popleft() for jobs in self._waiting.values() for _ in range(len(jobs))]
            self._changed.notify_all()
        self._refuse(left)

    def _refuse(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.future.running() or job.future.set_running_or_notify_cancel():
                job.future.set_exception(PoolClosed(self._closed))

    # ------------------------------------------------------------------------------------------------ one batch

    def _take(self) -> list[_Job]:
        """The next batch, of the component whose job has waited longest; empty when the pool is closed."""
        with self._changed:
            while not self._closed:
                jobs = min((j for j in self._waiting.values() if j), key=lambda j: j[0].order, default=None)
                if jobs is None:
                    self._changed.wait()
                    continue
                name, before = jobs[0].component, len(jobs)
                if self._late[name] >= LATE_IN_A_ROW:
                    batch = _pass_over(jobs, self.components[name]["timeout_s"])
                else:
                    shares = self._workers if name in self._concurrent else 2 * self._workers
                    batch = _cut(jobs, shares, self._hosting.budget)
                self._ended[False] += before - len(jobs) - len(batch)
                if batch:
                    return batch
        return []

    def _run(self, process: RequestProcess, batch: Sequence[_Job]) -> bool:
        """Give every job of the batch a result, or put it back. False: the process must be replaced."""
        component = batch[0].component
        timeout_s: float = self.components[component]["timeout_s"]
        together = component in self._concurrent
        left = dict(enumerate(batch))
        try:
            items = ", ".join(job.item for job in batch)
            process.request(f'{{"component": {encode_value(component)}, "items": [{items}]}}')
            deadline = time.monotonic() + timeout_s + (GRACE_S if together else 0.0)
            while left:
                replies = process.replies(deadline)
                if not replies:
                    self._blame_late(left, timeout_s, together)
                    return False
                for reply in replies:
                    index, outcome = _outcome(reply, timeout_s)
                    if index in left:
                        self._settle(left.pop(index), outcome)
                if not together:
                    deadline = time.monotonic() + timeout_s
        except BrokenFrame as error:  # the batch is one item that is too long
            for job in left.values():
                self._settle(job, Outcome(error=str(error)))
        except ChildLost as death:
            self._blame_death(left, str(death), together)
            return False
        except Exception:
            self._put_back(list(left.values()))
            raise
        return True

    def _settle(self, job: _Job, outcome: Outcome) -> None:
        with self._changed:
            self._ended[outcome.late] += 1
            self._late[job.component] = self._late[job.component] + 1 if outcome.late else 0
        job.future.set_result(outcome)

    def _blame_late(self, left: dict[int, _Job], timeout_s: float, together: bool) -> None:
        for index in list(left) if together else [min(left)]:
            self._settle(left.pop(index), _late(timeout_s))
        self._put_back(list(left.values()))

    def _blame_death(self, left: dict[int, _Job], reason: str, together: bool) -> None:
        if self._closed:
            self._refuse(list(left.values()))
            return
        if together and len(left) > 1:
            for job in left.values():
                job.alone = True
        elif left:
            self._settle(left.pop(min(left)), Outcome(error=reason))
        self._put_back(list(left.values()))

    def _put_back(self, jobs: Sequence[_Job]) -> None:
        with self._changed:
            if not self._closed:
                for job in reversed(jobs):
                    self._waiting[job.component].appendleft(job)
                self._changed.notify_all()
                return
        self._refuse(jobs)


def _cut(jobs: deque[_Job], shares: int, budget: int | None) -> list[_Job]:
    """A share of a queue, so that all processes end at about the same time; cancelled calls are dropped."""
    size = max(1, min(LARGEST_BATCH, -(-len(jobs) // shares))) if budget is None else len(jobs)
    size = 1 if jobs[0].alone else size
    batch: list[_Job] = []
    cost = characters = 0
    while jobs and len(batch) < size and (not batch or not jobs[0].alone):
        if batch and budget is not None and cost + jobs[0].cost > budget:
            break
        if batch and characters + len(jobs[0].item) > LARGEST_BATCH_CHARACTERS:
            break
        job = jobs.popleft()
        if job.future.running() or job.future.set_running_or_notify_cancel():
            batch.append(job)
            cost += job.cost
            characters += len(job.item)
    return batch


def _pass_over(jobs: deque[_Job], timeout_s: float) -> list[_Job]:
    """Fail the calls of a component that is late again and again; returns the batch that is left to run: none."""
    outcome = Outcome(error=why_passed_over(jobs[0].component, timeout_s))
    while jobs:
        job = jobs.popleft()
        if job.future.running() or job.future.set_running_or_notify_cancel():
            job.future.set_result(outcome)
    return []


def submit_all(pool: RewardPool, answers: Sequence[Trajectory], case: str) -> list[Call]:
    """Ask every component about the answers to a prompt."""
    calls: list[Call] = []
    responses, roles = [one.response for one in answers], [one.role for one in answers]
    for name in pool.components if answers else ():
        if name in pool.whole_groups:
            calls.append((name, range(len(answers)), pool.submit(name, responses, roles, case)))
        else:
            calls += [(name, (i,), pool.submit(name, one.response, one.role, case)) for i, one in enumerate(answers)]
    return calls


def encode_case(ground_truth: Any, row: Mapping[str, Any]) -> str:
    """Ground truth and row as JSON, encoded once for all answers to one prompt.

    Raises TypeError naming the column that cannot be sent to a process.
    """
    columns = []
    for name, value in row.items():
        try:
            columns.append(f"{encode_value(str(name))}: {encode_value(value)}")
        except (TypeError, ValueError) as error:
            raise TypeError(f"column {name!r} of the row: {error}") from error
    return f"{encode_value(ground_truth)}, {{{', '.join(columns)}}}"


def _outcome(reply: Mapping[str, Any], timeout_s: float) -> tuple[int, Outcome]:
    """Number of the item and its outcome. Raises ChildLost for a reply that lacks something."""
    try:
        index, seconds = int(reply["item"]), float(reply["seconds"])
        if reply.get("late"):
            return index, replace(_late(timeout_s), printed=str(reply.get("printed", "")))
        if reply.get("answers"):
            return index, Outcome(seconds=seconds, answers=tuple(_value(one) for one in reply["answers"]))
        return index, replace(_value(reply), seconds=seconds)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ChildLost(f"the reward process broke the protocol: {error!r} in {reply!s:.200}") from error


def _value(reply: Mapping[str, Any]) -> Outcome:
    printed = str(reply.get("printed", ""))
    if "error" in reply:
        return Outcome(error=str(reply["error"]), printed=printed)
    return Outcome(float(reply["value"]), {str(k): float(v) for k, v in reply["parts"].items()}, printed=printed)


def _late(timeout_s: float) -> Outcome:
    return Outcome(error=f"no answer within {timeout_s:g} s", late=True, seconds=timeout_s)
