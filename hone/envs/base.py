"""The interface of an environment. Each episode has its own object, which starts it and responds to each completion.

An environment never sees a model: it gets completions as text, tool calls and token ids, and responds with messages.
The episode loop (`hone.envs.episode`) keeps the tokens, which are append-only.

Who caused a failure decides what it becomes. The policy (a broken call, arguments that make a tool slow): a message to
read, or an episode that ends `truncated`. The infrastructure (a lost server or sandbox): an exception, which becomes
`env_failed`, never a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.data.messages import Tools
from hone.deadline import Stalled
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.types import Called, Completion, Message, Metric, Prompt, Status


class ToolLost(RuntimeError):
    """A server, process or sandbox that a tool needs is gone: the episode is `env_failed`, whatever the policy did."""


class Language(Protocol):
    """Conversion between messages and tokens (`hone.data.rendering.Renderer` implements it)."""

    tokenizer: Any

    def with_images(self, messages: Sequence[Message]) -> tuple[Message, ...]: ...

    def render_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]: ...

    def render_continuation(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Tools = ()
    ) -> tuple[int, ...]: ...

    def renders_tools(self, messages: Sequence[Message], tools: Tools) -> bool: ...

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str: ...

    def shorten(self, text: str, max_tokens: int) -> str: ...

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    @property
    def template(self) -> str: ...

    @property
    def opened_thought(self) -> str: ...

    def answer(self, ids: Sequence[int]) -> str: ...


NOT_FOREIGN = (Stalled, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)
"""What ends a run or a task and is raised inside foreign code. All else that such code raises is its own failure."""


class BadArguments(ValueError):
    """The arguments of a call do not fit its tool's schema."""


@dataclass(frozen=True, slots=True)
class Start:
    """Beginning of an episode: messages, rendered with the tools, or else `token_ids` as they are."""

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    tools: Tools = ()  # JSON schemas, for the chat template
    anchor: str = ""  # the state in which the first turn begins; see `TurnSpan`


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's response to one completion: more messages, or the end of the episode."""

    done: bool
    messages: tuple[Message, ...] = ()  # appended after the completion, rendered without re-encoding it
    status: Status = Status.OK  # TRUNCATED ends the episode; ENV_FAILED: it is not trained on
    error: str = ""
    reward: float | None = None  # of the turn that the completion was
    anchor: str = ""  # the state in which the next turn begins
    answer: str | None = None  # what the rewards judge; None: everything that the policy wrote
    calls: tuple[Called, ...] = ()  # the tool calls of this turn
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # recorded as rollout/<name>


class Env(Protocol):
    """One episode, used once. An exception in a method is an environment failure, never a reward of 0."""

    async def start(self) -> Start:
        """Return what the policy reads first."""

    async def step(self, said: Said, completion: Completion) -> StepResult:
        """Respond to one completion; `said` is its text, with thoughts and tool calls apart."""

    async def close(self) -> None:
        """Release the episode's resources (sandbox, connections). Called exactly once, also after a failure."""


class EnvFactory(Protocol):
    """Creates the environment for one sample of one prompt; `settings.env` are the environment's own."""

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> Env: ...


def is_single_turn(make_env: EnvFactory) -> bool:
    """Return whether each episode has one completion, so that `episode.max_turns` is unused.

    A class says so by `single_turn = True`; a class that extends it does not inherit that.
    """
    return bool(vars(make_env).get("single_turn"))


class Shared(Protocol):
    """Parts that the episodes of a run share: loaded tools, running servers. It creates their environments.

    An environment class that has `for_run(settings) -> Shared` is asked once, before any episode.
    """

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> Env: ...

    async def close(self) -> None:
        """End what was started. Called once, after the last episode."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call."""

    text: str  # what the policy reads
    failed: bool = False  # the call did not do what it was for; the policy reads why
    done: bool = False  # the episode ends with this call
    reward: float | None = None  # of the turn; several calls of a turn add up
    anchor: str = ""  # the state after the call


class Tool(Protocol):
    """A function that the policy may call."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """Its JSON schema, as chat templates take it: {"type": "function", "function": {"name": ...}}."""

    @property
    def timeout_s(self) -> float:
        """Deadline of one call."""

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one call. Raises `BadArguments`, or `ToolLost` if its infrastructure is gone.

        Any other exception is the call's error, which the policy reads.
        """

    async def check(self) -> None:
        """Return if what runs the calls still works, after a call that was late. Has a deadline. Raises ToolLost."""


__all__ = [
    "NOT_FOREIGN",
    "BadArguments",
    "Called",
    "Env",
    "EnvFactory",
    "Language",
    "Shared",
    "Start",
    "StepResult",
    "Tool",
    "ToolLost",
    "ToolResult",
    "is_single_turn",
]
