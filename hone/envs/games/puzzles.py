"""Several attempts at a problem of Reasoning Gym: its verifier scores each answer, and a wrong one may be mended.

    prompt --> answer --verifier, in a process of its own--> score --below the target--> "Try again." --> answer ...

The rewards of an episode's turns add up to the score of its best answer, so an attempt earns what it improved.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hone.config import ConfigError
from hone.data.answers import between_tags
from hone.envs.base import Start, StepResult, ToolLost
from hone.envs.settings import EpisodeConfig, PuzzleSettings
from hone.envs.tool_calls import Said
from hone.processes.request_process import END_S, ChildLost, ChildSpec, RequestProcess
from hone.processes.restarts import Restarts
from hone.types import Completion, Message, Prompt

CHILD = ChildSpec("process of Reasoning Gym's verifiers", "hone.envs.games.puzzle_program")
PARTS = ("task", "entry", "question", "answer", "metadata")  # of a row, that verifiers read
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
        """Start the verifiers' process. Raises ConfigError if it cannot run."""
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
    """Creates the environments of a run's episodes, and has the process that scores (`hone.envs.base.Shared`)."""

    def __init__(self, settings: PuzzleSettings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hone-verifiers")  # one answer at a time
        self._restarts = Restarts(RESTARTS, RESTARTS_S)
        self._process: RequestProcess | None = None
        try:
            self._thread.submit(self._start).result(settings.start_timeout_s + 2 * END_S)
        except (ChildLost, OSError) as error:
            self._thread.shutdown(wait=False)
            raise ConfigError(f"episode.env: Reasoning Gym's verifiers do not start: {error}") from error

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> PuzzleEnv:
        return PuzzleEnv(self, prompt, self._settings)

    async def score(self, answer: str | None, row: Mapping[str, Any]) -> float:
        """Raises VerifierFailed, and ToolLost if the process died or hangs."""
        problem = {part: row[part] for part in PARTS if part in row}
        asked = json.dumps({"answer": answer, "row": problem})
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, asked)

    def _score(self, asked: str) -> float:
        try:
            process = self._process or self._start()
            process.request(asked)
            replies = process.replies(time.monotonic() + self._settings.step_timeout_s)
        except (ChildLost, OSError) as error:
            self._kill()
            raise ToolLost(str(error)) from error
        if not replies:
            self._kill()
            raise ToolLost(
                f"the verifier did not answer within {self._settings.step_timeout_s:g} s (episode.env.step_timeout_s)"
            )
        if "error" in replies[0]:
            raise VerifierFailed(replies[0]["error"])
        return float(replies[0]["score"])

    def _start(self) -> RequestProcess:
        if not self._restarts.take():
            raise ChildLost(f"the {CHILD.name} ended again and again, and is given up after {self._restarts}")
        process = RequestProcess(CHILD)
        try:
            process.hello({}, self._settings.start_timeout_s)
        except BaseException:
            process.kill()
            raise
        self._restarts.worked()
        self._process = process
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._kill)
        self._thread.shutdown(wait=False)


__all__ = ["PuzzleEnv", "Verifier", "VerifierFailed"]
