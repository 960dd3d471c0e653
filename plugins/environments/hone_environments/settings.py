"""Settings of the environments, and of the tasks of verifiers. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from hone.config import Choice, setting
from hone.envs.settings import EndpointSettings, EnvSettings


class GymnasiumSettings(EnvSettings):
    """A Gymnasium environment whose actions can be written as text."""

    name: str = setting("gymnasium", "a Gymnasium environment with text or numbered actions")
    id: str = setting(meaning="its registered name, such as FrozenLake-v1, or package.module:Name-v0")
    options: dict[str, Any] = setting(meaning="keyword arguments of gymnasium.make", factory=dict)
    actions: list[str] = setting(meaning="names of numbered actions, in order; empty: their numbers", factory=list)


class TextWorldSettings(EnvSettings):
    """Games of TextWorld, played in a Python that has the package."""

    name: str = setting("textworld", "games of TextWorld, in a Python of their own")
    games: list[str] = setting(
        meaning="files of games, as tw-make writes them; a row's column game chooses one, or else its seed",
        min_length=1,
    )
    python: str = setting("", "Python that has textworld; default: the one that runs hone")
    show_commands: bool = setting(False, "end each observation with the commands that the game understands there")
    start_timeout_s: float = setting(60.0, "deadline of starting TextWorld, and each game once", unit="s", gt=0)
    step_timeout_s: float = setting(30.0, "deadline of one step", unit="s", gt=0)


class OpenEnvSettings(EnvSettings):
    """An environment of an OpenEnv server."""

    name: str = setting("openenv", "an environment of a running OpenEnv server, by WebSocket")
    url: str = setting(meaning="address of its WebSocket, such as ws://127.0.0.1:8000/ws")
    action_field: str | None = setting(
        None, "field of the action that gets the answer as text; null: the answer is the action, as a JSON object"
    )
    observation_field: str | None = setting(
        None, "field of the observation that the policy reads; null: the whole observation, as JSON"
    )
    reset: dict[str, Any] = setting(meaning="further arguments of reset; seed comes from the prompt", factory=dict)
    headers: dict[str, str] = setting(meaning="HTTP headers of the connection, such as Authorization", factory=dict)
    max_sessions: int | None = setting(
        None, "sessions at a time; further episodes wait for one. null: as many as episodes", unit="sessions", ge=1
    )
    start_timeout_s: float = setting(30.0, "deadline of connecting and reset", unit="s", gt=0)
    step_timeout_s: float = setting(30.0, "deadline of one step", unit="s", gt=0)

    @field_validator("url")
    @classmethod
    def _is_a_websocket(cls, url: str) -> str:
        scheme, _, rest = url.partition("://")
        if scheme not in ("ws", "wss") or not rest:
            raise ValueError("should be the address of a WebSocket, such as ws://127.0.0.1:8000/ws")
        return url


class VerifiersTasksSettings(Choice):
    """The tasks of a taskset of the package verifiers, for `episode.env=verifiers`."""

    name: str = "verifiers"
    taskset: str = setting(meaning="its installed name, or a module in the working folder")
    python: str = setting("", "Python that has verifiers and the taskset; default: the one that runs hone")
    options: dict[str, Any] = setting(factory=dict, meaning="further keys of the taskset's own settings")
    size: int | None = setting(None, "largest number of tasks; null: all, if the taskset has an end", unit="rows", ge=1)
    timeout_s: float = setting(300.0, "deadline of reading the tasks", unit="s", gt=0)


class VerifiersSettings(EndpointSettings):
    """An environment of the package verifiers, with its own agent, tools and rewards."""

    name: str = setting("verifiers", "an environment of the package verifiers")
    taskset: str = setting(meaning="its installed name, or a module in the working folder")
    python: str = setting("", "Python that has verifiers and the taskset; default: the one that runs hone")
    options: dict[str, Any] = setting(
        meaning="further keys of verifiers' section env, such as {agent: {harness: {id: bash}}}", factory=dict
    )
    start_timeout_s: float = setting(120.0, "deadline of loading the environment", unit="s", gt=0)


class NemoGymSettings(EndpointSettings):
    """Tools and rewards of a resources server of NeMo Gym."""

    name: str = setting("nemo_gym", "a running resources server of NeMo Gym, by HTTP")
    url: str = setting(meaning="its address, such as http://127.0.0.1:8000")
    headers: dict[str, str] = setting(meaning="HTTP headers of each request, such as Authorization", factory=dict)
    tool_timeout_s: float = setting(30.0, "deadline of one tool call, which the policy then reads", unit="s", gt=0)
    verify_timeout_s: float = setting(120.0, "deadline of seed_session, and of verify", unit="s", gt=0)
    max_output_characters: int = setting(
        32_000, "longest output of a call that the policy reads; its end is left out", unit="characters", ge=1
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https") or not rest:
            raise ValueError("should be an address such as http://127.0.0.1:8000")
        return url
