"""Classes with the `reset` and `step` of gym, whose observations and actions are text, as environments.

    prompt + first observation --> answer --its text--> step(text) --> reward of the turn, next observation

    class Guess:                                            # episode.env: guess.py:Guess
        def reset(self, seed=None):                         # -> observation, info
        def step(self, action):                             # -> observation, reward, terminated, truncated, info

The class needs no package. A plug-in has an environment that reads numbered actions from text.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import zlib
from collections.abc import Callable
from typing import Any

from hone.config import ConfigError
from hone.envs.base import Start, StepResult
from hone.envs.functions import in_thread
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.plugins import NUMBERED_ACTIONS, elsewhere, how_to_get
from hone.registry import reason
from hone.types import Completion, Message, Prompt

LOG = logging.getLogger(__name__)
_STEP = "step() should return (observation, reward, terminated, truncated, info)"


class GymClassEnv:
    """One episode of an object with `reset` and `step`, which run in threads."""

    def __init__(self, make: Callable[[], Any], prompt: Prompt) -> None:
        self._make = make
        self._prompt = prompt
        self._made: Any = None
        self._closed = False
        self._lock = threading.Lock()  # of these two: an object may be made after `close`, when nobody waits for it

    async def start(self) -> Start:
        await in_thread(self._begin)
        takes = inspect.signature(self._made.reset).parameters
        seeded = "seed" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())
        given = {"seed": seed_of(self._prompt)} if seeded else {}
        observation = await self._called(lambda: self._made.reset(**given))
        if isinstance(observation, tuple) and len(observation) == 2:  # (observation, info)
            observation = observation[0]
        return Start(messages=opening(self._prompt, str(observation)), anchor=str(observation))

    def _begin(self) -> None:
        made = self._make()
        with self._lock:
            self._made, late = made, self._closed
        if late:
            _close_unused(made)
            return
        _require_text(made)

    async def step(self, said: Said, completion: Completion) -> StepResult:
        """Raises TypeError if the class returns something else than gym's `step` does."""
        returned = await self._called(lambda: self._made.step(said.content))
        if not isinstance(returned, tuple) or len(returned) not in (4, 5):  # 4: (observation, reward, done, info)
            raise TypeError(f"{type(self._made).__name__}.{_STEP}, found {returned!r:.200}")
        observation, reward, *ends, _ = returned
        return StepResult(
            done=any(bool(one) for one in ends),
            messages=(Message(role="user", content=str(observation)),),
            reward=float(reward),
            anchor=str(observation),
            answer=said.content,
        )

    async def close(self) -> None:
        with self._lock:
            self._closed, made = True, self._made
        if callable(getattr(made, "close", None)):
            await self._called(made.close)

    async def _called(self, method: Callable[[], Any]) -> Any:
        returned = await in_thread(method)
        return await returned if inspect.isawaitable(returned) else returned


class GymClass:
    """The environments of a run whose `episode.env` names such a class (`hone.envs.base.Shared`)."""

    def __init__(self, name: str, cls: type[Any]) -> None:
        """Raises ConfigError for a class that cannot be made, or whose actions are no text.

        An object is made for that, except of a class that takes the prompt, which may need a real one.
        """
        self._cls = cls
        takes = inspect.signature(cls)
        self._wants_prompt = "prompt" in takes.parameters
        try:
            takes.bind(**({"prompt": None} if self._wants_prompt else {}))
            made = cls if self._wants_prompt else cls()
            close = None if self._wants_prompt else getattr(made, "close", None)
            if callable(close) and not inspect.iscoroutinefunction(close):
                close()
        except Exception as error:  # foreign code may raise anything
            raise ConfigError(
                f"episode.env: {name} cannot be made: {reason(error)} (each parameter of {cls.__name__}() needs a "
                "default, except prompt, which gets the prompt)"
            ) from error
        try:
            _require_text(made)
        except TypeError as error:
            raise ConfigError(f"episode.env: {name}: {error}") from error

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> GymClassEnv:
        given = {"prompt": prompt} if self._wants_prompt else {}
        return GymClassEnv(lambda: self._cls(**given), prompt)

    async def close(self) -> None:
        return None


def _close_unused(made: Any) -> None:
    """Close an object whose episode ended while it was made, in the thread that made it."""
    if not callable(getattr(made, "close", None)):
        return
    try:
        returned = made.close()
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
    except Exception as error:  # noqa: BLE001  foreign code may raise anything, and nobody waits for this thread
        LOG.warning("an environment that was made too late did not close: %s", reason(error))


def _require_text(made: Any) -> None:
    """Raise TypeError for a class or an object that says that its actions are no text."""
    space = getattr(made, "action_space", None)
    if space is not None and not isinstance(space, property) and type(space).__name__ != "Text":
        raise TypeError(
            f"the actions are {space}, and a class in a file is given the text of an answer. Either let step() read "
            f"the action from text and remove action_space, or register the class with {NUMBERED_ACTIONS} and set "
            f"episode.env.name={NUMBERED_ACTIONS} episode.env.id=MODULE:NAME, which reads numbered actions: "
            f"{how_to_get(elsewhere('environment')[NUMBERED_ACTIONS])}"
        )


def is_gym_class(found: Any) -> bool:
    """Return whether it is a class with `reset` and `step`, and without what hone's own environments have."""
    methods = inspect.isclass(found) and callable(getattr(found, "reset", None)) and callable(getattr(found, "step", 0))
    return bool(methods) and not hasattr(found, "start") and not hasattr(found, "for_run")


def seed_of(prompt: Prompt) -> int:
    """The seed of an episode: the column `seed` of its row, or else a number made from the prompt's name.

    All samples of a prompt have the same.
    """
    return int(prompt.row.get("seed", zlib.crc32(prompt.prompt_id.encode())))


def opening(prompt: Prompt, observation: str) -> tuple[Message, ...]:
    """The messages of a prompt, with the first observation at the end of the last one."""
    *before, last = prompt.messages
    asked = f"{last['content']}\n\n{observation}" if last.get("content") else observation
    return (*before, Message(**{**last, "content": asked}))


__all__ = ["GymClass", "GymClassEnv", "is_gym_class", "opening", "seed_of"]
