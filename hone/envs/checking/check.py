"""Play episodes with policies that need no model, and note what is wrong with an environment.

    prompts x (scripted, random) --two episodes each, the same actions--> what was seen --compared--> findings

A problem would end a run, waste it, or make its result random. A warning is what a run copes with. Every call of the
environment has a deadline. `watched` also ends calls that block the event loop, which `asyncio` cannot.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from hone.data.messages import Tools
from hone.envs.base import Env, EnvFactory, Language, Shared, Start, StepResult, is_single_turn
from hone.envs.checking.policies import POLICIES, Policy
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.processes.supervisor import descendants
from hone.registry import reason
from hone.types import Completion, Message, Metric, Prompt, Status, StopReason

R = TypeVar("R")
ROLES = ("system", "developer", "user", "tool")
CHARACTERS_PER_TOKEN = 4  # where no tokenizer is known
HUGE = 1_000_000  # characters; one such text in every turn slows a run down
GRACE_S = 5.0  # beyond the deadline of a call, until its event loop counts as blocked
SPECIAL = frozenset(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|return|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "<s>",
        "</s>",
        "<bos>",
        "<eos>",
    ]
)
"""Special tokens of the usual model families, where no tokenizer is known."""
TYPED = frozenset({"type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"})  # one of them says what a value may be


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: Literal["problem", "warning"]
    text: str


@dataclass(slots=True)
class Checkup:
    """Record of an environment's behaviour in its episodes."""

    findings: list[Finding] = field(default_factory=list)
    endings: dict[str, Counter[str]] = field(default_factory=dict)  # policy -> how many episodes ended how
    tools: tuple[str, ...] = ()
    start: Start | None = None  # of the first episode
    turns: int = 0
    longest: int = 0  # characters of the longest text that the policy could read
    longest_cut: int = 0  # of those that were cut
    doing: str = ""  # the call in progress
    since: float = 0.0  # when it began

    def note(self, kind: Literal["problem", "warning"], text: str) -> None:
        finding = Finding(kind, text)
        if finding not in self.findings:
            self.findings.append(finding)

    @property
    def problems(self) -> int:
        return sum(one.kind == "problem" for one in self.findings)

    @property
    def episodes(self) -> int:
        return sum(endings.total() for endings in self.endings.values())


@dataclass(slots=True)
class _Played:
    """One episode: what the policy saw first, what it saw then, and how the episode ended."""

    start: str = ""
    seen: list[str] = field(default_factory=list)
    ending: str = "failed"


class _Failed(Exception):
    """A call of the environment failed; the finding is noted."""


class Checker:
    """Plays the environments of one factory."""

    def __init__(
        self, make_env: EnvFactory, config: EpisodeConfig, language: Language | None, timeout_s: float
    ) -> None:
        """`language`: of the model that will be trained; None: sizes and special tokens are estimated."""
        self.found = Checkup()
        self._make_env = make_env
        self._config = config
        self._language = language
        self._timeout_s = timeout_s
        self._turns = 1 if is_single_turn(make_env) else config.max_turns
        self._special = SPECIAL if language is None else special_tokens(language)

    async def run(self, prompts: Sequence[Prompt], shared: Shared | None) -> None:
        """Play every prompt with every policy, twice; then end what the episodes shared."""
        before = set(descendants(os.getpid()))
        for prompt in prompts:
            for make in POLICIES:
                first, second = [await self._play(prompt, make(prompt, 0), make.name) for _ in range(2)]
                self._compare(first, second)
        if shared is not None:
            await self._within(shared.close(), "close() of what the episodes share")
        self._judge()
        left = [one for one in descendants(os.getpid()) if one not in before]
        if left:
            self.found.note("problem", f"after the last episode {len(left)} of its processes still run: {left[:5]}")

    async def _play(self, prompt: Prompt, policy: Policy, name: str) -> _Played:
        played = _Played()
        try:
            env = self._made(prompt)
            try:
                await self._episode(env, policy, played)
            finally:
                await self._within(env.close(), "close()")
        except _Failed:
            played.ending = "failed"
        self.found.endings.setdefault(name, Counter())[played.ending] += 1
        return played

    def _made(self, prompt: Prompt) -> Env:
        try:
            return self._make_env(prompt, 0, self._config)
        except Exception as error:
            self.found.note("problem", f"making the environment of prompt {prompt.prompt_id} raised {reason(error)}")
            raise _Failed from error

    async def _episode(self, env: Env, policy: Policy, played: _Played) -> None:
        start = await self._within(env.start(), "start()")
        if not isinstance(start, Start) or not (start.messages or start.token_ids):
            self.found.note(
                "problem", f"start() should return a Start with messages or token_ids, found {start!r:.100}"
            )
            raise _Failed
        played.start = _text_of([start.messages, start.token_ids, start.tools])
        self._check_start(start)
        for turn in range(self._turns):
            result = await self._step(env, policy.says(turn, start.tools))
            played.seen.append(_text_of([result.messages, result.done, result.reward, result.anchor]))
            self.found.turns += 1
            if result.status is not Status.OK:
                played.ending = str(result.status.value)
                return
            if result.done:
                played.ending = "done"
                return
        played.ending = "not done"

    async def _step(self, env: Env, said: Said) -> StepResult:
        text = said.content or (said.calls[0].text if said.calls else "")
        ids = tuple(text.encode())
        completion = Completion("check", ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)
        result = await self._within(env.step(said, completion), "step()", f" for the answer {_shown(said)}")
        if not isinstance(result, StepResult) or not isinstance(result.messages, Sequence):
            self.found.note(
                "problem", f"step() should return a StepResult with a list of messages, found {result!r:.100}"
            )
            raise _Failed
        if not result.status.trainable:
            self.found.note("problem", f"step() for the answer {_shown(said)} failed: {result.error or result.status}")
        elif not result.done and result.status is Status.OK and not result.messages:
            self.found.note("problem", f"step() for the answer {_shown(said)} is neither done nor has it a message")
            raise _Failed
        if result.reward is not None and not (isinstance(result.reward, int | float) and math.isfinite(result.reward)):
            self.found.note("problem", f"the reward of a turn is {result.reward!r}; expected a finite number")
        for name, one in result.metrics.items():
            if not isinstance(one, Metric):
                self.found.note("problem", f"metrics[{name!r}] is {one!r:.80}; expected hone.types.Metric.mean(...)")
        self._check_messages(result.messages, "an observation")
        return result

    async def _within(self, call: Awaitable[R], name: str, detail: str = "") -> R:
        """Await a call of the environment; note it, and raise _Failed, if it raises or is late."""
        self.found.doing, self.found.since = name, time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await call
        except Exception as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            what = f"did not return within {self._timeout_s:g} s" if late else f"raised {reason(error)}"
            self.found.note("problem", f"{name}{detail} {what}")
            raise _Failed from error
        finally:
            self.found.doing = ""

    # ------------------------------------------------------------------------------------------- what is looked at

    def _check_start(self, start: Start) -> None:
        self.found.start = self.found.start or start
        self._check_messages(start.messages, "the start", roles=(*ROLES, "assistant"))
        for one in tool_findings(start.tools):
            self.found.note(one.kind, one.text)
        self.found.tools = tuple(str(_function(one).get("name")) for one in start.tools)
        if start.tools and not hasattr(self._config.env, "parser"):
            missing = "it offers tools, but its settings have no key parser, so a run finds no call in an answer"
            self.found.note("warning", f"{missing}; derive the settings from hone.envs.settings.ToolCallSettings")
        if self._language is None or not start.messages or not start.tools:
            return
        if not self._language.renders_tools(start.messages, start.tools):
            self.found.note("problem", "the chat template does not show the tools to the model; set data.chat_template")

    def _check_messages(self, messages: Sequence[Message], where: str, roles: Sequence[str] = ROLES) -> None:
        for role in sorted({str(one.get("role")) for one in messages} - set(roles)):
            self.found.note("problem", f"{where} has a message of the role {role!r}; expected {', '.join(roles)}")
        for text in (one["content"] for one in messages if isinstance(one.get("content"), str)):
            self.found.longest = max(self.found.longest, len(text))
            for token in sorted(one for one in self._special if one in text):
                self.found.note("warning", f"{where} contains the special token {token}; hone encodes it as plain text")
            if where != "the start" and self._is_cut(text):
                self.found.longest_cut = max(self.found.longest_cut, len(text))

    def _is_cut(self, text: str) -> bool:
        most = self._config.limits.max_observation_tokens
        if self._language is None:
            return len(text) > most * CHARACTERS_PER_TOKEN
        return self._language.shorten(text, most) != text

    def _compare(self, first: _Played, second: _Played) -> None:
        if first.start != second.start:
            text = "two episodes of one prompt and sample start differently, so no run can be repeated"
            self.found.note("problem", text)
        elif first.seen != second.seen:
            pairs = zip(first.seen, second.seen, strict=False)
            turn = next((i for i, (one, other) in enumerate(pairs) if one != other), len(second.seen))
            text = f"the same answers led to another response in turn {turn + 1}, so no run can be repeated"
            self.found.note("warning", text)

    def _judge(self) -> None:
        """Look at all episodes together."""
        total = sum(self.found.endings.values(), Counter())
        if total["not done"] and not total["done"]:
            text = f"it never ends: no episode was done within {self._turns} turns (episode.max_turns)"
            self.found.note("problem", text)
        if length := self.found.longest_cut:
            most = self._config.limits.max_observation_tokens
            self.found.note(
                "problem" if length > HUGE else "warning",
                f"an observation has {length:,} characters; the policy reads {most} tokens of it "
                f"(episode.env.max_observation_tokens)",
            )


def watched(checker: Checker, prompts: Sequence[Prompt], shared: Shared | None, timeout_s: float) -> Checkup:
    """Run a checker in a thread, and give up on a call that blocks its event loop."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(checker.run(prompts, shared))
        except _Failed:  # what the episodes share did not close; it is noted
            pass
        except BaseException as error:  # noqa: BLE001  raised again by the caller
            failure.append(error)

    thread = threading.Thread(target=run, name="check", daemon=True)
    thread.start()
    found = checker.found
    while thread.is_alive():
        thread.join(0.1)
        doing, since = found.doing, found.since
        if doing and time.monotonic() - since > timeout_s + GRACE_S:
            text = f"{doing} blocks the event loop and so all episodes: use await, or asyncio.to_thread"
            found.note("problem", text)
            return found
    if failure:
        raise failure[0]
    return found


def special_tokens(language: Language) -> frozenset[str]:
    """The special tokens of a tokenizer."""
    tokenizer = language.tokenizer
    return frozenset({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})


def tool_findings(tools: Tools) -> Iterator[Finding]:
    """Find the faults of the tools' schemas."""
    for called, count in Counter(str(_function(one).get("name")) for one in tools).items():
        if count > 1:
            yield Finding("problem", f"{count} tools are called {called}; a call could mean any of them")
    for one in tools:
        function = _function(one)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            text = f'a tool should be {{"type": "function", "function": {{"name": ...}}}}, found {one!r:.100}'
            yield Finding("problem", text)
            continue
        if not str(function.get("description") or "").strip():
            yield Finding(
                "warning", f"tool {name} has no description (docstring), so the model has to guess what it does"
            )
        properties = (function.get("parameters") or {}).get("properties") or {}
        for parameter, schema in properties.items():
            if not set(schema) & TYPED:
                text = f"tool {name}: parameter {parameter} has no type (annotation), so the model has to guess it"
                yield Finding("problem", text)


def _function(tool: Any) -> Mapping[str, Any]:
    found = tool.get("function") if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _shown(said: Said) -> str:
    calls = "; ".join(f"{one.name or 'a broken call'}({one.text})" for one in said.calls)
    text = calls or said.content
    return repr(text if len(text) <= 100 else text[:97] + "...")


__all__ = ["Checker", "Checkup", "Finding", "special_tokens", "tool_findings", "watched"]
