"""What one agent did at the endpoint, token by token: trajectories that grow while it talks.

    request: messages --does its history extend a recorded one?--> yes: recorded ids + rendering of what is new
                                                                   no:  a new track, rendered from the start
    answer:  sampled ids, log-probs, versions  --commit-->  the track; the messages that the client was told

A track is one trajectory. Its ids are only appended to; nothing that was sampled is ever encoded again. A client whose
history goes back to an earlier point of a track (a retry, several samples of one prompt, a branch) continues from the
recorded ids of that point on a track of its own, where they have loss mask 0: each sampled token is trained on once.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.data.routes import Routes, joined_routes
from hone.types import Completion, GenerateFn, Message, SamplingParams, Status, StopReason, Trajectory

MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")


class Language(Protocol):
    """Messages to tokens and back (`hone.data.rendering.Renderer` is one)."""

    tokenizer: Any

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]: ...

    def render_continuation(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Whose requests a session answers, and how they are sampled."""

    generate: GenerateFn
    sampling: SamplingParams  # the run's; `max_tokens` is the budget of all answers together
    request_id: str  # of its requests, which are `<request_id>/<number>`
    seed_of: Callable[[int], int]  # number of a request -> its seed
    client_sampling: bool = False  # whether temperature, top_p ... of a request count; else the run's do
    adapters: tuple[str, ...] = ()  # served beside the policy; a request that names one as its model is answered by it


@dataclass(eq=False)
class Track:
    """One trajectory while it grows: four lists of one length, only ever appended to."""

    tools: str  # as JSON; empty for plain text
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None  # see `hone.data.routes`
    messages: list[Message] = field(default_factory=list)  # as the client knows them
    text: str = ""  # of text completions: what the ids say, with special tokens and stop strings that were not told
    marks: list[tuple[int, int]] = field(default_factory=list)  # (messages, ids) where a history may go on or branch
    response: str = ""
    turns: int = 0
    prompt_length: int = 0
    stop_reason: StopReason = StopReason.STOP
    busy: bool = False

    def branch(self, length: int, messages: int) -> Track:
        """A track of its own that begins with the first `length` ids of this one, as a prompt."""
        return Track(
            tools=self.tools,
            ids=self.ids[:length],
            mask=[0] * length,
            logprobs=[0.0] * length,
            versions=[-1] * length,
            routes=None if self.routes is None else self.routes[:length],
            messages=self.messages[:messages],
            text=self.text,
        )

    def observe(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sample(self, completion: Completion, text: str) -> None:
        if not self.turns:
            self.prompt_length = len(self.ids)
        self.ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.weight_versions
        self.routes = joined_routes(self.routes, completion.routed_experts)
        self.response += text
        self.turns += 1
        self.stop_reason = completion.stop_reason


@dataclass(frozen=True, slots=True)
class Opening:
    """A request that was placed on a track: what is new, and what the engine is to continue."""

    track: Track
    new_ids: tuple[int, ...]
    new_messages: tuple[Message, ...] = ()
    new_text: str | None = None  # of a text completion that was asked with text

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*self.track.ids, *self.new_ids)


class AgentSession:
    """The requests of one agent in one episode."""

    def __init__(self, task: AgentTask, language: Language) -> None:
        self.task = task
        self.language = language
        self.tracks: list[Track] = []
        self.failure: BaseException | None = None  # of the rollout engine: it ends the run, not only the request
        self.outgrown = False  # whether a request was refused because of its length, or because the budget is used up
        self.waiting = 0  # requests that are being generated
        self.hung_up_at = -math.inf  # when (time of the event loop) a client last left before it was answered
        self._numbered = 0
        self._spent = 0
        self._reserved = 0  # by requests that are open
        self._released = asyncio.Event()

    @property
    def budget(self) -> int:
        """Tokens that may still be sampled, and that no open request may come to need."""
        return self.task.sampling.max_tokens - self._spent - self._reserved

    async def room(self, wanted: int | None, answers: int) -> int:
        """Tokens for each of some answers, of which at most `wanted` are asked for (None: all that are left).

        Waits while open requests hold what is wanted: they may leave it. 0: the budget is used up.
        """
        while self._reserved and self.budget < answers * (wanted or self.task.sampling.max_tokens):
            await self._released.wait()
        left = self.budget // answers
        return min(wanted or left, left)

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Tokens that no other request gets meanwhile; what was sampled of them is in the budget's account by then."""
        self._reserved += tokens
        try:
            yield
        finally:
            self._reserved -= tokens
            self._released.set()
            self._released = asyncio.Event()

    def next_number(self) -> int:
        """The number of the next sample: its request id and its seed follow from it."""
        self._numbered += 1
        return self._numbered - 1

    # ------------------------------------------------------------------------------------------------ opening

    def open_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Opening:
        """Place a chat request. Raises ConfigError (of the renderer) for messages that cannot be rendered."""
        known = [normal(message) for message in messages]
        offered = json.dumps(list(tools), sort_keys=True)
        found = self._recorded(known, offered)
        if found is None:
            return self._opened(Track(offered), self.rendered(messages, tools), tuple(known))
        track, (count, length) = found
        new = known[count:]
        ids = self.language.render_continuation(track.ids[:length], new, tools) if new else ()
        if track.busy or length < len(track.ids) or not new:
            track = track.branch(length, count)
        return self._opened(track, ids, tuple(new))

    def _recorded(self, known: list[Message], tools: str) -> tuple[Track, tuple[int, int]] | None:
        """The track and place whose history these messages extend, the longest there is."""
        best: tuple[Track, tuple[int, int]] | None = None
        for track in self.tracks:
            for count, length in track.marks if track.tools == tools else ():
                if track.messages[:count] != known[:count] or (best and best[1][1] >= length):
                    continue
                after_answer = track.messages[count - 1].get("role") == "assistant"
                new = known[count:]
                extends = after_answer and new and all(one.get("role") != "assistant" for one in new)
                if extends or (not after_answer and not new):
                    best = track, (count, length)
        return best

    def open_text(self, prompt: str | Sequence[int]) -> Opening:
        """Place a text completion: its prompt is text, or ids."""
        for track in sorted(self.tracks, key=lambda one: -len(one.ids)):
            if track.tools or track.busy:
                continue
            if isinstance(prompt, str) and track.text and prompt.startswith(track.text):
                rest = prompt[len(track.text) :]
                return self._opened(track, self._encode(rest), text=rest)
            if not isinstance(prompt, str) and tuple(prompt[: len(track.ids)]) == tuple(track.ids):
                return self._opened(track, prompt[len(track.ids) :])
        if isinstance(prompt, str):
            return self._opened(Track(""), self._encode(prompt), text=prompt)
        return self._opened(Track(""), prompt)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids of a chat request from its beginning. Raises ConfigError for messages that cannot be rendered."""
        return self.language.render_prompt([_for_template(normal(message)) for message in messages], tools)

    def encoded(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The ids of a text completion's prompt."""
        return self._encode(prompt) if isinstance(prompt, str) else tuple(prompt)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.language.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    @staticmethod
    def _opened(
        track: Track, ids: Sequence[int], messages: tuple[Message, ...] = (), text: str | None = None
    ) -> Opening:
        track.busy = True
        return Opening(track, tuple(ids), messages, text)

    # ----------------------------------------------------------------------------------------------- recording

    def commit(self, opening: Opening, answers: Sequence[tuple[Completion, Message | None]]) -> None:
        """Record what was sampled and told: completion and message of each answer, on a track each."""
        track = opening.track
        length, messages = len(track.ids), len(track.messages)
        tracks = [track, *(track.branch(length, messages) for _ in answers[1:])]
        for one, (completion, message) in zip(tracks, answers, strict=True):
            one.observe(opening.new_ids)
            one.messages += opening.new_messages
            if message is not None:
                one.marks.append((len(one.messages), len(one.ids)))
                one.messages.append(normal(message))
            one.sample(completion, self.language.decode(completion.token_ids))
            if message is None:
                said = opening.new_text
                one.text += self.language.decode(opening.new_ids, keep_special=True) if said is None else said
                one.text += self.language.decode(completion.token_ids, keep_special=True)
            else:
                one.marks.append((len(one.messages), len(one.ids)))
            self._spent += len(completion.token_ids)
            one.busy = False
            if one not in self.tracks:
                self.tracks.append(one)

    @staticmethod
    def give_up(opening: Opening) -> None:
        """The request failed: the track is as it was before."""
        opening.track.busy = False

    def trajectories(self, prompt_id: str, sample: int, answer: str | None = None) -> list[Trajectory]:
        """What was recorded, a trajectory per track, all of episode `sample`; `answer` replaces their text."""
        return [
            Trajectory(
                prompt_id=prompt_id,
                sample=sample,
                token_ids=tuple(track.ids),
                prompt_length=track.prompt_length,
                loss_mask=tuple(track.mask),
                rollout_logprobs=tuple(track.logprobs),
                weight_versions=tuple(track.versions),
                response=track.response if answer is None else answer,
                stop_reason=track.stop_reason,
                status=Status.TRUNCATED if track.stop_reason is StopReason.LENGTH else Status.OK,
                episode=sample,
                turns=track.turns,
                routed_experts=track.routes,
            )
            for track in self.tracks
        ]


def normal(message: Mapping[str, Any]) -> Message:
    """A message as it is compared and rendered: known keys only, no nulls, text parts joined."""
    found: dict[str, Any] = {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
    content = found.get("content", "")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    found["content"] = content
    if "tool_calls" in found:
        found["tool_calls"] = [
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            }
            for call in found["tool_calls"]
        ]
    return Message(**found)  # type: ignore[typeddict-item]


def _for_template(message: Message) -> Message:
    """Chat templates want the arguments of a call as an object, the protocol has them as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with suppress(json.JSONDecodeError):  # what the model wrote is no JSON: the template shows it as it is
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return Message(**{**message, "tool_calls": calls})


__all__ = ["AgentSession", "AgentTask", "Language", "Opening", "Track", "normal"]
