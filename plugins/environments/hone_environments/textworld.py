"""Episodes in games of TextWorld (https://github.com/microsoft/TextWorld), in a Python of its own.

    prompt + first description --> answer --its last line, a command--> game --> points of the turn, what happens
    TextWorldEnv --start, step, close--> textworld_program.py (one process, all episodes of the run)

The package pins versions that hone's environment cannot have, so hone speaks to a program in the Python that has it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.envs.base import Start, StepResult, ToolLost
from hone.envs.gym_class import opening, seed_of
from hone.envs.mcp.restarted import RestartedProgram, loaded
from hone.envs.mcp.transports import PipeTransport
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.processes.child import END_S
from hone.types import Completion, Message, Prompt
from hone_environments.settings import TextWorldSettings
from hone_environments.text_actions import Refusals

PROGRAM = Path(__file__).with_name("textworld_program.py")
LONGEST_COMMAND = 200  # characters


class GameFailed(RuntimeError):
    """TextWorld could not start a game or take a step."""


class TextWorldEnv:
    """One game."""

    def __init__(self, games: TextWorldGames, prompt: Prompt, settings: TextWorldSettings) -> None:
        self._games = games
        self._prompt = prompt
        self._settings = settings
        self._refusals = Refusals(settings.max_bad_calls)
        self._episode = games.next_number()
        self._score = 0.0
        self._process: PipeTransport | None = None  # that has this game

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> TextWorldGames:
        """Start each game once, to see that it can be played. Raises ConfigError."""
        assert isinstance(settings.env, TextWorldSettings)
        return TextWorldGames(settings.env)

    async def start(self) -> Start:
        seed = seed_of(self._prompt)
        game = str(self._prompt.row.get("game") or self._settings.games[seed % len(self._settings.games)])
        self._process = await self._games.process()
        found = await self._ask("start", {"game": game, "seed": seed})
        text = self._text_of(found)
        return Start(messages=opening(self._prompt, text), anchor=text)

    async def step(self, said: Said, completion: Completion) -> StepResult:
        command = command_in(said.content)
        if not command:
            why = f"There is no command in {said.content[:100]!r}. Expected: one command in the last line."
            return self._refusals.refuse(said.content, why)
        found = await self._ask("step", {"command": command})
        text = self._text_of(found)
        points = (found["score"] - self._score) / (found["max_score"] or 1.0)
        self._score = found["score"]
        return StepResult(
            done=found["done"],
            messages=(Message(role="user", content=text),),
            reward=points,
            anchor=text,
            answer=said.content,
        )

    async def close(self) -> None:
        if self._process is not None:
            with suppress(ToolLost):  # its games are gone with it
                await self._ask("close", {})

    def _text_of(self, found: Mapping[str, Any]) -> str:
        listed = self._settings.show_commands and found["commands"] and not found["done"]
        return f"{found['text']}\n\nCommands: {', '.join(found['commands'])}" if listed else str(found["text"])

    async def _ask(self, method: str, params: Mapping[str, Any]) -> Any:
        assert self._process is not None
        return await self._games.ask(self._process, method, {"episode": self._episode, **params})


class TextWorldGames:
    """Creates the environments of a run's episodes, and has the process that plays them (`hone.envs.base.Shared`)."""

    def __init__(self, settings: TextWorldSettings) -> None:
        missing = next((game for game in settings.games if not Path(game).is_file()), None)
        if missing is not None:
            raise ConfigError(f"episode.env.games: {missing} does not exist; make one with tw-make, from TextWorld")
        self._settings = settings
        self._program = RestartedProgram("TextWorld", lambda: self._started(()))
        self._numbers = itertools.count(1)
        with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop, which it would block anyway
            thread.submit(asyncio.run, self._check()).result(settings.start_timeout_s + 2 * END_S)

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> TextWorldEnv:
        return TextWorldEnv(self, prompt, self._settings)

    def next_number(self) -> int:
        return next(self._numbers)

    async def process(self) -> PipeTransport:
        """The process; starts it if it does not run. Raises ToolLost."""
        return await self._program.running()

    async def ask(self, process: PipeTransport, method: str, params: Mapping[str, Any]) -> Any:
        """Raises GameFailed, and ToolLost for a process that died or hangs."""
        message = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": dict(params)}
        try:
            async with asyncio.timeout(self._settings.step_timeout_s):
                response = await process.request(message)
        except TimeoutError as error:
            await process.end()  # it has all games, so their episodes fail too; the next one starts another
            raise ToolLost(
                f"TextWorld did not answer within {self._settings.step_timeout_s:g} s (episode.env.step_timeout_s)"
            ) from error
        if "error" in response:
            raise GameFailed(str(response["error"].get("message")))
        return response["result"]

    async def close(self) -> None:
        await self._program.close()

    async def _started(self, games: tuple[str, ...]) -> PipeTransport:
        """A new process that has imported TextWorld and started `games` once. Raises ToolLost."""
        settings = self._settings
        transport = PipeTransport("textworld", [settings.python or sys.executable, str(PROGRAM)], {})
        message = {"jsonrpc": "2.0", "id": next(self._numbers), "method": "load", "params": {"games": list(games)}}
        return await loaded(transport, message, settings.start_timeout_s)

    async def _check(self) -> None:
        try:
            transport = await self._started(tuple(self._settings.games))
        except ToolLost as error:
            raise ConfigError(
                f"episode.env: TextWorld cannot play {', '.join(self._settings.games)}: {error} (its Python is "
                f"{self._settings.python or sys.executable}; set episode.env.python to one that has textworld)"
            ) from error
        await transport.close()


def command_in(text: str) -> str:
    """The command of an answer: its last line that is not empty; "" if there is none or it is too long.

    >>> command_in("The box is closed.\\n> open box\\n")
    'open box'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    command = lines[-1].removeprefix(">").strip() if lines else ""
    return command if len(command) <= LONGEST_COMMAND else ""


__all__ = ["GameFailed", "TextWorldEnv", "TextWorldGames", "command_in"]
