"""`make_runner`: what runs the episodes that a run file names, made once before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from hone.config import ConfigError, count_as_read
from hone.envs import ENVS, EPISODES
from hone.envs.base import EnvFactory, Shared
from hone.envs.episode import EpisodeRunner, Play, ScoreFn
from hone.envs.gym_class import GymClass, is_gym_class
from hone.envs.settings import EpisodeConfig
from hone.envs.text_codec import TextCodec
from hone.envs.tool_calls import parser_of
from hone.types import Prompt, TrajectoryGroup


class Runner(Protocol):
    """Runs groups of episodes to their end, and scores each group as soon as it is complete."""

    async def run(self, prompts: Sequence[Prompt], play: Play, score: ScoreFn) -> list[TrajectoryGroup]:
        """The groups of `prompts`, in their order. Raises what the rollout engine or the scoring raised."""

    async def close(self) -> None:
        """End what the episodes share. Called once, on the event loop of `run`."""


class _Runner(EpisodeRunner):
    """An `EpisodeRunner` that ends what its episodes share."""

    def __init__(self, config: EpisodeConfig, make_env: EnvFactory, codec: TextCodec, shared: Shared | None) -> None:
        super().__init__(config, make_env, codec)
        self._shared = shared

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()


def make_runner(config: EpisodeConfig, renderer: Any) -> Runner:
    """The runner of the episodes that `episode.env` names; `renderer` is a `hone.data.rendering.Renderer`.

    Raises ConfigError for an agent program, tools or a tool-call parser that cannot be used.
    """
    name = config.env.name
    if name not in ENVS:
        runner: Runner = EPISODES.get(name)(config, config.env, renderer)
        return runner
    make_env, shared = environments(config)
    count_as_read(config.env)  # an environment reads its settings when an episode begins: they count as read
    parser = getattr(config.env, "parser", "none")
    return _Runner(config, make_env, TextCodec(renderer, parser_of(parser, renderer.template)), shared)


def environments(config: EpisodeConfig) -> tuple[EnvFactory, Shared | None]:
    """Return the factory of a run's environments, and the part that has to be closed after the run.

    Raises UnknownName, or ConfigError for an environment that cannot be used.
    """
    name = config.env.name
    found: Any = ENVS.get(name)
    shared: Shared | None = found.for_run(config) if hasattr(found, "for_run") else None
    if is_gym_class(found):
        shared = GymClass(name, found)
    _check_factory(name, shared or found, config)
    return shared or found, shared


def _check_factory(name: str, make_env: Any, config: EpisodeConfig) -> None:
    try:
        inspect.signature(make_env).bind(None, 0, config)
    except TypeError as error:
        raise ConfigError(f"environment {name} should take (prompt, sample, settings): {error}") from error
