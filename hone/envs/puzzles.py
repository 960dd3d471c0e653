"""Several attempts at a problem of Reasoning Gym: its verifier scores each answer, and a wrong one may be mended.

    prompt --> answer --verifier, in processes of its own--> score --below the target--> "Try again." --> answer ...

The rewards of an episode's turns add up to the score of its best answer, so an attempt earns what it improved.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from hone.config import ConfigError
from hone.data.answers import between_tags
from hone.envs.base import Start, StepResult, ToolLost
from hone.envs.settings import EpisodeConfig, PuzzleSettings
from hone.envs.tool_calls import Said
from hone.processes.request_process import END_S, ChildLost, ChildSpec, RequestProcess
from hone.processes.restarts import Restarts
from hone.types import Completion, Message, Prompt

CHILD = ChildSpec("process that scores by Reasoning Gym", "hone.envs.puzzle_program")
PARTS = ("task", "entry", "question", "answer", "metadata")  # of a row, that scoring reads
PROCESSES = 4  # at most; an answer that hangs one does not hold up the others
RESTARTS, RESTARTS_S = 5, 120.0


class VerifierFailed(RuntimeError):
    """The verifier raised, or the row is no problem of Reasoning Gym."""


class PuzzleEnv:
    """One problem, until it is solved or `episode.max_turns` attempts were made."""

    def __init__(self, verifier: Verifier, prompt: Prompt, settings: PuzzleSettings) -> None:
        self._verifier = verifier
        self._prompt = prompt
        self._settings = settings
        self._best = 0.0
        self._tried: list[str] = []

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> Verifier:
        """Start the first of the processes that score. Raises ConfigError if it cannot run."""
        assert isinstance(settings.env, PuzzleSettings)
        return Verifier(settings.env)

    async def start(self) -> Start:
        return Start(messages=self._prompt.messages, anchor=self._anchor)

    async def step(self, said: Said, completion: Completion) -> StepResult:
        settings = self._settings
        answer = between_tags(said.content, settings.tag) if settings.tag else said.content
        score = await self._verifier.score(answer, self._prompt.row)
        gained, self._best = max(score - self._best, 0.0), max(score, self._best)
        self._tried.append((answer or "").strip())
        solved = score >= settings.target
        return StepResult(
            done=solved,
            messages=() if solved else (Message(role="user", content=settings.feedback.format(score=score)),),
            reward=gained * settings.later ** (len(self._tried) - 1),
            anchor=self._anchor,
            answer=said.content,
        )

    @property
    def _anchor(self) -> str:
        """The state: what was tried, in any order."""
        return "\n".join(sorted(self._tried))

    async def close(self) -> None:
        return None


class Verifier:
    """Creates the environments of a run's episodes, and has the processes that score (`hone.envs.base.Shared`).

    Each thread uses one process at a time. A process is started when an answer comes and all others are busy. A start
    that replaces a process which died counts as a restart; one that replaces a process which an answer hung does not.
    """

    def __init__(self, settings: PuzzleSettings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="hone-puzzles")
        self._idle: SimpleQueue[RequestProcess] = SimpleQueue()
        self._processes: set[RequestProcess] = set()
        self._starting = Lock()
        self._restarts = Restarts(RESTARTS, RESTARTS_S)
        self._deaths = 0  # that no restart has replaced
        self._closed = False
        try:
            self._idle.put(self._threads.submit(self._start).result(settings.start_timeout_s + 2 * END_S))
        except (ChildLost, OSError) as error:
            self._threads.shutdown(wait=False)
            raise ConfigError(f"episode.env: Reasoning Gym does not start: {error}") from error

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> PuzzleEnv:
        return PuzzleEnv(self, prompt, self._settings)

    async def score(self, answer: str | None, row: Mapping[str, Any]) -> float:
        """Raises VerifierFailed, and ToolLost if the process died, or hangs whatever the answer is."""
        problem = {part: row[part] for part in PARTS if part in row}
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, answer, problem)

    def _score(self, answer: str | None, problem: Mapping[str, Any]) -> float:
        """An answer that hangs two processes scores 0, if the next one scores the problem's own answer in time."""
        for _ in range(2):
            score = self._ask(answer, problem)
            if score is not None:
                return score
        entry = problem.get("entry")
        if self._ask((entry if isinstance(entry, Mapping) else problem)["answer"], problem) is not None:
            return 0.0
        late = f"{self._settings.step_timeout_s:g} s (episode.env.step_timeout_s)"
        raise ToolLost(f"the verifier did not answer within {late}, and neither for the problem's own answer")

    def _ask(self, answer: str | None, problem: Mapping[str, Any]) -> float | None:
        """The score; None if the verifier hangs, and its process was ended."""
        try:
            process = self._free_process()
        except (ChildLost, OSError) as error:
            raise ToolLost(str(error)) from error
        try:
            process.request(json.dumps({"answer": answer, "row": problem}))
            replies = process.replies(time.monotonic() + self._settings.step_timeout_s)
        except (ChildLost, OSError) as error:
            self._end(process)
            with self._starting:
                self._deaths += 1
            raise ToolLost(str(error)) from error
        if not replies:
            self._end(process)
            return None
        self._idle.put(process)
        if "error" in replies[0]:
            raise VerifierFailed(replies[0]["error"])
        try:
            return float(replies[0]["score"])
        except (KeyError, TypeError, ValueError) as error:
            raise VerifierFailed(f"its process gave {replies[0]!s:.200} where a score was due") from error

    def _free_process(self) -> RequestProcess:
        try:
            return self._idle.get_nowait()
        except Empty:
            return self._start()

    def _start(self) -> RequestProcess:
        with self._starting:
            died = self._deaths > 0
            if died:
                if not self._restarts.take():
                    raise ChildLost(f"the {CHILD.name} ended again and again, and is given up after {self._restarts}")
                time.sleep(self._restarts.pause_s)
            if self._closed:
                raise ChildLost(f"the {CHILD.name} is closed")
            self._deaths += not died  # until it is ready
            process = RequestProcess(CHILD)
            self._processes.add(process)
            try:
                process.hello({}, self._settings.start_timeout_s)
            except BaseException:
                self._end(process)
                raise
            self._deaths -= 1
            self._restarts.worked()
            return process

    def _end(self, process: RequestProcess) -> None:
        process.kill()
        self._processes.discard(process)

    async def close(self) -> None:
        self._closed = True
        for process in tuple(self._processes):
            process.stop()  # threads that wait for it go on at once
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in tuple(self._processes):
            self._end(process)


__all__ = ["PuzzleEnv", "Verifier", "VerifierFailed"]
