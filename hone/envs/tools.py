"""Episodes with tools: the policy calls them and reads their results, until it answers without a call.

    completion --parser--> calls --each in turn, with a deadline--> messages of role "tool" --> next completion
                 no call --> the answer, which the rewards judge

A broken or unknown call, arguments that do not fit, a tool that raises or takes too long: the policy reads what was
wrong. `max_bad_calls` ends an episode that only writes calls nobody can run. `ToolLost` is a failure of the
environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from hone.config import ConfigError
from hone.envs.base import BadArguments, Start, StepResult, Tool, ToolLost, ToolResult
from hone.envs.functions import Toolbox
from hone.envs.settings import EnvSettings, EpisodeConfig, ToolsSettings
from hone.envs.tool_calls import Call, Said, arguments_text
from hone.types import Called, Completion, Message, Prompt, Status

_LOGGED = 2000  # characters of arguments and results in the log
_BAD = ("broken", "unknown", "arguments")


class ToolEnv:
    """One episode with tools that are Python functions."""

    def __init__(self, prompt: Prompt, tools: Sequence[Tool], limits: EnvSettings) -> None:
        self._prompt = prompt
        self._tools = by_name(tools)
        self._limits = limits
        self._made = 0
        self._bad = 0

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> FunctionTools:
        """Load the tools that the run file names. Raises ConfigError if that fails."""
        return FunctionTools(settings)

    async def start(self) -> Start:
        if self._prompt.images:
            raise ConfigError(f"{self._prompt.prompt_id} has images, and an episode with tools takes text only")
        return Start(messages=self._prompt.messages, tools=tuple(one.spec for one in self._tools.values()))

    async def step(self, said: Said, completion: Completion) -> StepResult:
        if not said.calls:
            return StepResult(done=True, answer=said.content)
        done, rewards, anchor = False, [], ""
        messages: list[Message] = []
        notes: list[Called] = []
        most = self._limits.max_calls_per_turn
        for number, call in enumerate(said.calls):
            result, note = await self._called(number, call)
            notes.append(note)
            if number > most:  # one message for all that are refused, so that many calls are no long observation
                continue
            self._made += 1
            messages.append(_message(call, result, self._made))
            rewards += [] if result.reward is None else [result.reward]
            done, anchor = done or result.done, result.anchor or anchor
        self._bad += sum(note.fault in _BAD for note in notes)
        hopeless = self._bad >= self._limits.max_bad_calls
        return StepResult(
            done=done,
            messages=tuple(messages),
            status=Status.TRUNCATED if hopeless and not done else Status.OK,
            error=f"{self._bad} calls that nobody could run" if hopeless and not done else "",
            reward=sum(rewards) if rewards else None,
            anchor=anchor,
            answer=said.content,
            calls=tuple(notes),
        )

    async def close(self) -> None:
        return None

    async def _called(self, number: int, call: Call) -> tuple[ToolResult, Called]:
        """Run one call, or say why not; its number is that within the turn."""
        began = time.perf_counter()
        fault, result = await self._run(number, call)
        written = call.text if call.error else arguments_text(call)
        seconds = time.perf_counter() - began
        return result, Called(call.name[:100], written[:_LOGGED], result.text[:_LOGGED], seconds, fault)  # type: ignore[arg-type]

    async def _run(self, number: int, call: Call) -> tuple[str, ToolResult]:
        if call.error:
            return "broken", _failed(f"the call could not be read: {call.error}")
        if number >= self._limits.max_calls_per_turn:
            return "refused", _failed(f"at most {self._limits.max_calls_per_turn} calls in one turn; no later one ran")
        tool = self._tools.get(call.name)
        if tool is None:
            return "unknown", _failed(f"there is no tool {call.name[:100]!r} (there is: {', '.join(self._tools)})")
        try:
            async with asyncio.timeout(tool.timeout_s) as deadline:
                result = await tool(call.arguments)
        except ToolLost:
            raise
        except TimeoutError as error:
            if not deadline.expired():  # the tool's own
                return "error", _failed(f"{type(error).__name__}: {error}")
            await tool.check()
            return "timeout", _failed(f"{call.name} did not finish within {tool.timeout_s:g} s")
        except BadArguments as error:
            return "arguments", _failed(str(error))
        except Exception as error:  # noqa: BLE001  the policy reads what its call caused
            return "error", _failed(f"{type(error).__name__}: {error}")
        return ("error" if result.failed else ""), result


class FunctionTools:
    """The environments of a run whose tools are Python functions."""

    def __init__(self, settings: EpisodeConfig) -> None:
        env = settings.env
        assert isinstance(env, ToolsSettings)
        references = [env.tools] if isinstance(env.tools, str) else list(env.tools)
        self._toolbox = Toolbox(references, env.options)
        self._timeout_s = env.tool_timeout_s

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> ToolEnv:
        return ToolEnv(prompt, self._toolbox.bound(prompt, self._timeout_s), settings.limits)

    async def close(self) -> None:
        return None


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by the names that calls use."""
    return {str(one.spec["function"]["name"]): one for one in tools}


def _failed(text: str) -> ToolResult:
    return ToolResult(f"error: {text}", failed=True)


def _message(call: Call, result: ToolResult, number: int) -> Message:
    """A tool's message; its id has nine letters and digits, because Mistral's template demands them."""
    return Message(
        role="tool", content=result.text, tool_call_id=f"call{number % 100_000:05d}", name=call.name or "tool"
    )


__all__ = ["FunctionTools", "ToolEnv", "by_name"]
