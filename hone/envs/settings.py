"""Settings of the episode loop."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import field_validator, model_validator

from hone.config import Choice, Config, FromRegistry, setting
from hone.data.settings import RowsConfig
from hone.envs import EPISODES
from hone.sandboxes.base import DEFAULT, Limits


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
        None,
        "longest conversation with its prompt; null: the engine's context, and in training the smallest token budget",
        unit="tokens",
        ge=1,
    )
    max_calls_per_turn: int = setting(16, "tool calls of one turn; those after them are refused", unit="calls", ge=1)
    max_bad_calls: int = setting(4, "the episode ends with this many broken or unknown calls", unit="calls", ge=1)
    retries: int = setting(
        0, "how often an episode is played again after a failure of its environment", unit="episodes", ge=0
    )


class ToolCallSettings(EnvSettings):
    """Base class of the settings of environments with tools."""

    tool_timeout_s: float = setting(
        30.0, "deadline of one tool call; the policy reads that it timed out", unit="s", gt=0
    )
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


class CorpusConfig(RowsConfig):
    """The passages that a policy can search: rows with a text, and usually a title."""

    text_column: str = setting("text", "column with the text of a passage")
    title_column: str | None = setting("title", "column with its title, which is searched too; null: no titles")


class SearchSettings(ToolCallSettings):
    """A tool that searches a corpus by its words."""

    name: str = setting("search", "a tool that searches a corpus of passages with BM25")
    corpus: CorpusConfig = setting(meaning="the passages")
    max_passages: int = setting(3, "passages that one search returns, unless the call asks for fewer", ge=1)
    max_passage_characters: int = setting(
        1000, "longest passage that the policy reads, with its title; its end is left out", unit="characters", ge=1
    )


class PuzzleSettings(EnvSettings):
    """Several attempts at problems of Reasoning Gym."""

    name: str = setting("reasoning_gym", "several attempts at a problem of Reasoning Gym")
    tag: str = setting("", "the answer is between the last <tag> and </tag>; empty: all that the policy wrote")
    target: float = setting(1.0, "score with which a problem is solved and the episode ends", gt=0, le=1)
    feedback: str = setting(
        "That is not right. Try again.", "what the policy reads after an answer below the target; may name {score:g}"
    )
    later: float = setting(1.0, "factor of the reward with each further attempt", ge=0, le=1)
    start_timeout_s: float = setting(60.0, "deadline of starting the process that scores", unit="s", gt=0)
    step_timeout_s: float = setting(30.0, "deadline of scoring one answer", unit="s", gt=0)

    @field_validator("feedback")
    @classmethod
    def _formats(cls, feedback: str) -> str:
        try:
            feedback.format(score=0.5)
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"{feedback!r} has a field other than {{score}} ({error}); write {{{{ and }}}} for braces"
            ) from error
        return feedback


class SandboxedSettings(ToolCallSettings):
    """Base class of the settings of `python` and `shell`: a sandbox for each episode, with these limits."""

    sandbox: str = setting("auto", "where programs run; auto: the first local one that works (hone list sandboxes)")
    url: str = setting("", "address of a remote sandbox service; some have a default")
    image: str = setting("", "what a remote sandbox starts from: a template, snapshot or image of its service")
    memory_mb: int = setting(DEFAULT.memory_mb, "memory of a program with its processes", unit="MB", ge=32)
    processes: int = setting(DEFAULT.processes, "processes and threads of a program", unit="processes", ge=1)
    output_kb: int = setting(DEFAULT.output_kb, "what a program may print before it is stopped", unit="KB", ge=1)
    disk_mb: int = setting(DEFAULT.disk_mb, "size of the working folder", unit="MB", ge=1)
    cpu_s: int = setting(DEFAULT.cpu_s, "processor time of each process of a program", unit="s", ge=1)
    network: bool = setting(DEFAULT.network, "whether programs may use the network")
    at_once: int = setting(
        DEFAULT.at_once, "programs that run at the same time; 0: one for each processor", unit="programs", ge=0
    )
    max_output_characters: int = setting(
        8000, "longest output that the policy reads; its middle is left out", unit="characters", ge=1
    )
    files_column: str | None = setting(None, "column of the data with the first files: path -> text")

    @property
    def limits_of_a_program(self) -> Limits:
        return Limits(
            **{name: getattr(self, name) for name in ("memory_mb", "processes", "output_kb", "disk_mb", "cpu_s")},
            network=self.network,
            at_once=self.at_once,
        )


class PythonSettings(SandboxedSettings):
    """A tool that runs Python programs."""

    name: str = setting("python", "a tool that runs Python programs in a sandbox")


class ShellSettings(SandboxedSettings):
    """A tool that runs shell commands."""

    name: str = setting("shell", "a tool that runs bash commands in a sandbox")


class EndpointSettings(Choice):
    """Base class of the settings of environments whose agents call the policy through the endpoint."""

    client_sampling: bool = setting(
        False,
        "use temperature, top_p ... of the agent's requests instead of rollout.sampling, which training needs",
    )
    parser: str = setting(
        "auto", "how tool calls are found in text, for requests that offer tools; auto: by the chat template"
    )
    adapters: dict[str, str] = setting(
        meaning="name -> folder of a LoRA adapter that requests may name as their model, such as an opponent",
        factory=dict,
    )


class AgentSettings(EndpointSettings):
    """An agent program that calls the policy through the OpenAI protocol. It does not import hone."""

    name: str = setting("agent", "an agent program that uses the endpoint")
    program: str = setting(meaning="async function (base_url, api_key, prompt): file.py:name or package.module:name")
    roles: tuple[str, ...] = setting(
        (), "roles of the policy, such as [proposer, solver]; requests name one as their model; (): there is one role"
    )

    @model_validator(mode="after")
    def _distinct_roles(self) -> AgentSettings:
        names = [*self.roles, *self.adapters]
        wrong = next((one for one in self.roles if not one.isidentifier() or names.count(one) > 1), None)
        if wrong is not None:
            raise ValueError(
                f"{self.key_of('roles')}: {wrong!r} should be a name of letters, digits and _ that no other role or "
                "adapter has"
            )
        return self


class EpisodeConfig(Config):
    """Settings of the episodes of a prompt."""

    env: Annotated[Choice, FromRegistry(EPISODES)] = setting(
        meaning="the environment of an episode", factory=lambda: Choice(name="chat")
    )
    max_turns: int = setting(8, "maximum number of completions in one episode", unit="turns", ge=1)
    timeout_s: float = setting(
        600.0, "deadline of one episode, without the time that its requests wait for a free server", unit="s", gt=0
    )

    @property
    def limits(self) -> EnvSettings:
        """The limits that the environment's settings have, or the defaults."""
        return self.env if isinstance(self.env, EnvSettings) else EnvSettings(name=self.env.name)


class EnvCheckConfig(Config):
    """Settings of `hone env check` where no run file is given."""

    episode: EpisodeConfig = setting(meaning="the episodes that are played", factory=EpisodeConfig)
