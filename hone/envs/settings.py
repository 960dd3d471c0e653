"""Settings of the episode loop."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import model_validator

from hone.config import Choice, Config, FromRegistry, setting
from hone.envs import EPISODES


class EnvSettings(Choice):
    """Base class of an environment's settings: the limits of an episode beyond `max_turns` and the deadlines."""

    max_turn_tokens: int | None = setting(
        None,
        "longest completion of one turn, which is then cut off; null: what is left of the episode",
        unit="tokens",
        ge=1,
    )
    max_observation_tokens: int = setting(
        8192, "longest response of the environment to one turn; a longer text is cut", unit="tokens", ge=1
    )
    max_episode_tokens: int | None = setting(
        None, "longest conversation with its prompt; null: the engine's context", unit="tokens", ge=1
    )
    max_calls_per_turn: int = setting(16, "tool calls of one turn; those after them are refused", unit="calls", ge=1)
    max_bad_calls: int = setting(4, "the episode ends with this many broken or unknown calls", unit="calls", ge=1)
    retries: int = setting(
        0, "how often an episode is played again after a failure of its environment", unit="episodes", ge=0
    )


class ToolCallSettings(EnvSettings):
    """Base class of the settings of environments with tools."""

    tool_timeout_s: float = setting(30.0, "deadline of one tool call, which the policy then reads", unit="s", gt=0)
    parser: str = setting("auto", "how tool calls are found in text; auto: by the chat template (hone list parsers)")


class ToolsSettings(ToolCallSettings):
    """Tools that are Python functions."""

    name: str = setting("tools", "Python functions as tools")
    tools: str | list[str] = setting(
        meaning="file.py:Class (its public methods), file.py:function, file.py (functions with @tool), or several"
    )
    options: dict[str, Any] = setting(meaning="keyword arguments of the classes' constructors", factory=dict)


class McpServer(Config):
    """One MCP server: exactly one of `command` and `url`."""

    command: list[str] | None = setting(
        None, "program and arguments of a server that speaks over stdin and stdout; `python` is hone's own interpreter"
    )
    url: str | None = setting(None, "address of a running server that speaks streamable HTTP")
    environment: dict[str, str] = setting(factory=dict, meaning="environment variables of the command")
    headers: dict[str, str] = setting(factory=dict, meaning="HTTP headers of each request to the url")
    tools: list[str] | None = setting(None, "names of the tools to offer; null: all of the server's")
    start_timeout_s: float = setting(30.0, "deadline of the start and of listing the tools", unit="s", gt=0)

    @model_validator(mode="after")
    def _one_kind(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            found = "neither" if self.url is None else "both"
            raise ValueError(f"exactly one of command and url should be set, found {found}")
        if self.command == []:
            raise ValueError("command should name a program, found an empty list")
        if self.url is not None and self.environment:
            raise ValueError("environment belongs to a command; remove it, or replace url by command")
        if self.command is not None and self.headers:
            raise ValueError("headers belong to a url; remove them, or replace command by url")
        return self


class McpSettings(ToolCallSettings):
    """Tools of servers that speak the Model Context Protocol."""

    name: str = setting("mcp", "tools of MCP servers")
    servers: dict[str, McpServer] = setting(meaning="the servers by name", min_length=1)


class GymnasiumSettings(EnvSettings):
    """A Gymnasium environment whose actions can be written as text."""

    name: str = setting("gymnasium", "a Gymnasium environment with text or numbered actions")
    id: str = setting(meaning="its registered name, such as FrozenLake-v1, or package.module:Name-v0")
    options: dict[str, Any] = setting(meaning="keyword arguments of gymnasium.make", factory=dict)
    actions: list[str] = setting(meaning="names of numbered actions, in order; empty: their numbers", factory=list)


class AgentSettings(Choice):
    """An agent program that calls the policy through the OpenAI protocol; it needs nothing else of hone."""

    name: str = setting("agent", "an agent program that uses the endpoint")
    program: str = setting(meaning="async function (base_url, api_key, prompt): file.py:name or package.module:name")
    client_sampling: bool = setting(
        False,
        "use temperature, top_p ... of the agent's requests instead of rollout.sampling, which training needs",
    )
    adapters: dict[str, str] = setting(
        meaning="name -> folder of a LoRA adapter that requests may name as their model, such as an opponent",
        factory=dict,
    )


class EpisodeConfig(Config):
    """How the episodes of a prompt run."""

    env: Annotated[Choice, FromRegistry(EPISODES)] = setting(
        meaning="the environment of an episode", factory=lambda: Choice(name="chat")
    )
    max_turns: int = setting(8, "maximum number of completions in one episode", unit="turns", ge=1)
    timeout_s: float = setting(
        600.0, "deadline of one episode, without its waits for a seat at the rollout", unit="s", gt=0
    )

    @property
    def limits(self) -> EnvSettings:
        """The limits that the environment's settings have, or the defaults."""
        return self.env if isinstance(self.env, EnvSettings) else EnvSettings(name=self.env.name)


class EnvCheckConfig(Config):
    """What `hone env check` reads where no run file is given."""

    episode: EpisodeConfig = setting(meaning="the episodes that are played", factory=EpisodeConfig)
