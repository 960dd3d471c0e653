"""Episodes in Gymnasium environments (https://gymnasium.farama.org) whose actions can be written as text.

    prompt + first observation --> answer --action in it--> env.step --> reward of the turn, next observation
                                          no such action --> a message that lists the actions

The seed of `reset` comes from the prompt, so all samples of a prompt start in the same state.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium

from hone.config import ConfigError
from hone.envs.base import Start, StepResult
from hone.envs.functions import in_thread
from hone.envs.gym_class import opening, seed_of
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.registry import reason
from hone.types import Completion, Message, Prompt
from hone_environments.settings import GymnasiumSettings
from hone_environments.text_actions import Refusals

COLOURS = re.compile(r"\x1b\[([0-9;]*)m")


class GymnasiumEnv:
    """One episode in a Gymnasium environment, which runs in a thread."""

    def __init__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> None:
        assert isinstance(settings.env, GymnasiumSettings)
        self._prompt = prompt
        self._settings = settings.env
        self._env: Any = None
        self._refusals = Refusals(settings.env.max_bad_calls)

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> GymnasiumEnvs:
        """Make one environment, to see that it can be made and played. Raises ConfigError."""
        assert isinstance(settings.env, GymnasiumSettings)
        return GymnasiumEnvs(settings.env)

    async def start(self) -> Start:
        self._env = await in_thread(lambda: _made(self._settings))
        observation, _ = await in_thread(lambda: self._env.reset(seed=seed_of(self._prompt)))
        text = await self._text_of(observation)
        return Start(messages=opening(self._prompt, text), anchor=text)

    async def step(self, said: Said, completion: Completion) -> StepResult:
        action = action_in(said.content, self._env.action_space, self._settings.actions)
        if action is None:
            expected = _described(self._env.action_space, self._settings)
            why = f"There is no action in {said.content[:100]!r}. Expected: {expected}."
            return self._refusals.refuse(said.content, why)
        observation, reward, terminated, truncated, _ = await in_thread(lambda: self._env.step(action))
        text = await self._text_of(observation)
        return StepResult(
            done=bool(terminated or truncated),
            messages=(Message(role="user", content=text),),
            reward=float(reward),
            anchor=text,
            answer=said.content,
        )

    async def close(self) -> None:
        if self._env is not None:
            await in_thread(self._env.close)

    async def _text_of(self, observation: Any) -> str:
        """The observation as text; with `render_mode: ansi`, followed by the rendering, coloured parts in brackets."""
        if self._env.render_mode != "ansi":
            return str(observation)
        return f"{observation}\n{in_brackets(str(await in_thread(self._env.render))).strip()}"


class GymnasiumEnvs:
    """Creates the environments of a run's episodes (`hone.envs.base.Shared`)."""

    def __init__(self, settings: GymnasiumSettings) -> None:
        try:
            env = _made(settings)
        except Exception as error:  # making it runs foreign code, which may raise anything
            raise ConfigError(f"episode.env.id: {settings.id} cannot be made: {reason(error)}") from error
        space = env.action_space
        env.close()
        if kind_of(space) not in ("Discrete", "Text"):
            raise ConfigError(
                f"episode.env.id: the actions of {settings.id} are {space}, which no text names; expected a Discrete "
                f"or a Text space (write a gymnasium.ActionWrapper)"
            )
        if settings.actions and (kind_of(space) != "Discrete" or len(settings.actions) != space.n):
            raise ConfigError(f"episode.env.actions has {len(settings.actions)} names; the actions are {space}")

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> GymnasiumEnv:
        return GymnasiumEnv(prompt, sample, settings)

    async def close(self) -> None:
        return None


def action_in(text: str, space: Any, names: list[str]) -> Any:
    """The action that a text states; None if it states none.

    Discrete actions: the last of their names, or of their numbers if they have no names. A Text space: the whole text.
    """
    if kind_of(space) == "Text":
        return text if space.contains(text) else None
    first = int(space.start)
    numbers = {name.lower(): first + number for number, name in enumerate(names)}
    numbers = numbers or {str(first + number): first + number for number in range(int(space.n))}
    longest_first = sorted(numbers, key=len, reverse=True)
    found = re.findall(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?!\w)", text.lower())
    return numbers[found[-1]] if found else None


def in_brackets(rendered: str) -> str:
    """A rendering without its colours: what had one is in brackets, because that is where toy texts have the player.

    >>> in_brackets("S\\x1b[41mF\\x1b[0mG"), in_brackets("S\\x1b[41mFG")
    ('S[F]G', 'SFG')
    """
    last = rendered.rfind("\x1b[0m")
    found, coloured, at = [], False, 0
    for code in COLOURS.finditer(rendered):
        found.append(rendered[at : code.start()])
        at = code.end()
        if coloured and code[1] == "0":
            coloured = False
            found.append("]")
        elif not coloured and code[1] not in ("", "0") and code.start() < last:
            coloured = True
            found.append("[")
    return "".join((*found, rendered[at:]))


def kind_of(space: Any) -> str:
    """The class of a space: Discrete, Text, Box and so on."""
    return type(space).__name__


def _made(settings: GymnasiumSettings) -> Any:
    return gymnasium.make(settings.id, **settings.options)


def _described(space: Any, settings: GymnasiumSettings) -> str:
    if kind_of(space) == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    first = int(space.start)
    return ", ".join(settings.actions) or f"a number from {first} to {first + int(space.n) - 1}"


__all__ = ["GymnasiumEnv", "GymnasiumEnvs", "action_in"]
