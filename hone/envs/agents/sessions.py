"""Record what one agent does at the endpoint, token by token, as growing trajectories.

    request: messages --does its history extend a recorded one?--> yes: recorded ids + rendering of what is new
                                                                   no:  a new track, rendered from the start
    answer:  sampled ids, log-probs, versions  --commit-->  the track; the messages that the client was told

A track is one trajectory. Ids are only appended; sampled tokens are never re-encoded. If a client's history goes back
to an earlier point of a track (a retry, several samples of one prompt, a branch), a new track starts with the recorded
ids up to that point. They have loss mask 0 there, so each sampled token is trained on once.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from hone.data.chat_template import encodable
from hone.data.images import images_in
from hone.data.messages import normal_message
from hone.data.routes import Routes, joined_routes
from hone.envs.agents.images import DecodedImages, has_images, with_bytes
from hone.envs.agents.protocol import BadRequest
from hone.envs.base import Language
from hone.types import Completion, GenerateFn, Image, Message, SamplingParams, Status, StopReason, Trajectory, TurnSpan

MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of a session: how its requests are sampled and named."""

    generate: GenerateFn
    sampling: SamplingParams  # of the run; `max_tokens` is the total for all answers
    request_id: str  # requests are named `<request_id>/<number>`
    seed_of: Callable[[int], int]  # request number -> seed
    client_sampling: bool = False  # use temperature, top_p ... of requests instead of the run's
    adapters: tuple[str, ...] = ()  # names that a request may give as its model
    roles: tuple[str, ...] = ()  # of the policy, one of which each request gives as its model; (): there is one
    max_turns: int | None = None  # requests that the policy answers; None: any number
    served: str = ""  # name of a finished model, whose answers are not recorded; empty: the policy of a run


@dataclass(eq=False)
class Track:
    """A growing trajectory: four append-only lists of equal length."""

    tools: str  # as JSON; empty for plain text
    role: str = ""  # that the policy plays in it
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None  # see `hone.data.routes`
    messages: list[Message] = field(default_factory=list)  # as `canonical` makes them
    text: str = ""  # text completions: all text of the ids, with special tokens and stop strings
    marks: list[tuple[int, int]] = field(default_factory=list)  # (messages, ids) where a history may continue or branch
    response: str = ""
    spans: list[TurnSpan] = field(default_factory=list)
    images: tuple[Image, ...] = ()  # in the order of their placeholders in the ids
    prompt_length: int = 0
    stop_reason: StopReason = StopReason.STOP
    busy: bool = False

    def branch(self, length: int, messages: int) -> Track:
        """Return a new track that begins with the first `length` ids of this one, as its prompt."""
        return Track(
            tools=self.tools,
            role=self.role,
            ids=self.ids[:length],
            mask=[0] * length,
            logprobs=[0.0] * length,
            versions=[-1] * length,
            routes=None if self.routes is None else self.routes[:length],
            messages=self.messages[:messages],
            text=self.text,
            images=images_in(self.messages[:messages]),
        )

    def observe(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sample(self, completion: Completion, text: str) -> None:
        if not self.spans:
            self.prompt_length = len(self.ids)
        self.spans.append(TurnSpan(len(self.ids), len(self.ids) + len(completion.token_ids)))
        self.ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.weight_versions
        self.routes = joined_routes(self.routes, completion.routed_experts)
        self.response += text
        self.stop_reason = completion.stop_reason


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request placed on a track: its new part, and the ids that the engine continues."""

    track: Track
    new_ids: tuple[int, ...]
    new_messages: tuple[Message, ...] = ()
    new_text: str | None = None  # for a text completion whose prompt is text
    opening: str = ""  # with which the answer has to begin: the policy reads it and writes the rest
    opening_ids: tuple[int, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*self.track.ids, *self.new_ids, *self.opening_ids)


class AgentSession:
    """The requests of one agent in one episode."""

    def __init__(self, task: AgentTask, language: Language) -> None:
        self.task = task
        self.language = language
        self.tracks: list[Track] = []
        self.failure: BaseException | None = None  # error of the rollout engine, which ends the run
        self.refused_for_length = False  # whether the last refusal was for length or budget
        self.waiting = 0  # requests in generation
        self.client_gone_at = -math.inf  # event-loop time of the last hang-up before an answer
        self.turns = 0  # requests that the policy answered or is answering
        self._numbered = 0
        self._spent = 0
        self._reserved = 0  # by open requests
        self._released = asyncio.Event()
        self._images = DecodedImages()
        self.recording = asyncio.Lock()  # held while tracks are read or changed, which may be in a thread

    @property
    def budget(self) -> int:
        """Tokens that may still be sampled and that no open request has reserved."""
        return self.task.sampling.max_tokens - self._spent - self._reserved

    async def room(self, wanted: int | None, answers: int) -> int:
        """Return the tokens available to each of `answers`, at most `wanted` (None: all that are left).

        Waits while open requests reserve them, because they may not use them all. 0: the budget is used up.
        """
        while self._reserved and self.budget < answers * (wanted or self.task.sampling.max_tokens):
            await self._released.wait()
        left = self.budget // answers
        return min(wanted or left, left)

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Reserve tokens; when the block ends, those that were sampled are already counted in the budget."""
        self._reserved += tokens
        try:
            yield
        finally:
            self._reserved -= tokens
            self._released.set()
            self._released = asyncio.Event()

    def next_number(self) -> int:
        """Return the number of the next sample, which gives its request id and its seed."""
        self._numbered += 1
        return self._numbered - 1

    # ------------------------------------------------------------------------------------------------- placing

    def place_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], opening: str = "", role: str = ""
    ) -> PlacedRequest:
        """Place a chat request, whose answer begins with `opening`, on a track of its role.

        Raises ConfigError (of the renderer) for messages that cannot be rendered.
        """
        messages = self._with_images(messages)
        known = [canonical(message) for message in messages]
        offered = json.dumps(list(tools), sort_keys=True)
        found = self._recorded(known, offered, role)
        if found is None or images_in(known[found[1][0] :]):  # a continuation has no images: the prompt has them all
            track, ids, new = Track(offered, role), self._render(messages, tools), known
            track.images = images_in(known)
        else:
            track, (count, length) = found
            new = known[count:]
            unseen = [normal(message) for message in messages[count:]]
            ids = self.language.render_continuation(track.ids[:length], unseen, tools) if new else ()
            if track.busy or length < len(track.ids) or not new:
                track = track.branch(length, count)
        track.busy = True
        return PlacedRequest(track, tuple(ids), tuple(new), opening=opening, opening_ids=self._encode(opening))

    def _recorded(self, known: list[Message], tools: str, role: str) -> tuple[Track, tuple[int, int]] | None:
        """Find the role's track, and the position in it, with the longest history that these messages extend."""
        best: tuple[Track, tuple[int, int]] | None = None
        for track in self.tracks:
            for count, length in reversed(track.marks) if (track.tools, track.role) == (tools, role) else ():
                if count > len(known) or (best and best[1][1] >= length):
                    continue
                after_answer = track.messages[count - 1].get("role") == "assistant"
                new = known[count:]
                extends = after_answer and new and all(one.get("role") != "assistant" for one in new)
                # the messages last: comparing them takes longest
                if (extends or (not after_answer and not new)) and track.messages[:count] == known[:count]:
                    best = track, (count, length)
        return best

    def place_text(self, prompt: str | Sequence[int], role: str = "") -> PlacedRequest:
        """Place a text completion, whose prompt is text or ids, on a track of its role."""
        for track in sorted(self.tracks, key=lambda one: -len(one.ids)):
            if track.tools or track.busy or track.role != role:
                continue
            if isinstance(prompt, str) and track.text and prompt.startswith(track.text):
                rest = prompt[len(track.text) :]
                return self._placed(track, self._encode(rest), text=rest)
            if not isinstance(prompt, str) and tuple(prompt[: len(track.ids)]) == tuple(track.ids):
                return self._placed(track, prompt[len(track.ids) :])
        if isinstance(prompt, str):
            return self._placed(Track("", role), self._encode(prompt), text=prompt)
        return self._placed(Track("", role), prompt)

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], opening: str = ""
    ) -> tuple[tuple[int, ...], tuple[Image, ...]]:
        """Ids and images of a chat request from its beginning, with the `opening` of its answer.

        Raises ConfigError if it cannot be rendered.
        """
        shown = self._with_images(messages)
        return self._render(shown, tools) + self._encode(opening), images_in(shown)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.language.render_prompt([normal(message) for message in messages], tools)

    def _with_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with their images read. Raises ConfigError for a model of text only."""
        if not has_images(messages):
            return messages
        return self._images.in_place(with_bytes(messages), self.language.with_images)

    def encoded(self, prompt: str | Sequence[int]) -> tuple[tuple[int, ...], tuple[Image, ...]]:
        """Return the ids of a text completion's prompt, which has no images."""
        return self._encode(prompt) if isinstance(prompt, str) else tuple(prompt), ()

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.language.tokenizer(encodable(text), add_special_tokens=False)["input_ids"]) if text else ()

    @staticmethod
    def _placed(track: Track, ids: Sequence[int], text: str | None = None) -> PlacedRequest:
        track.busy = True
        return PlacedRequest(track, tuple(ids), new_text=text)

    # ----------------------------------------------------------------------------------------------- recording

    def commit(self, placed: PlacedRequest, answers: Sequence[tuple[Completion, Message | None]]) -> None:
        """Record the answers to a request, completion and message of each, one track per answer."""
        track = placed.track
        length, messages = len(track.ids), len(track.messages)
        tracks = [track, *(track.branch(length, messages) for _ in answers[1:])]
        for one, (completion, message) in zip(tracks, answers, strict=True):
            one.images = track.images
            one.observe(placed.new_ids)
            one.messages += placed.new_messages
            if message is not None:
                one.marks.append((len(one.messages), len(one.ids)))
                one.messages.append(canonical(message))
            one.observe(placed.opening_ids)
            one.sample(completion, self._response_to(placed, completion, message is not None))
            if message is None:
                said = placed.new_text
                one.text += self.language.decode(placed.new_ids, keep_special=True) if said is None else said
                one.text += self.language.decode(completion.token_ids, keep_special=True)
            else:
                one.marks.append((len(one.messages), len(one.ids)))
            self._spent += len(completion.token_ids)
            one.busy = False
            if one not in self.tracks:
                self.tracks.append(one)

    def _response_to(self, placed: PlacedRequest, completion: Completion, chat: bool) -> str:
        """The text of an answer as rewards read it."""
        text = self.language.answer(completion.token_ids)
        if not chat:  # the client rendered the prompt: the template of the model has opened nothing
            return text.removeprefix(self.language.opened_thought)
        return placed.opening + (text.removeprefix(self.language.opened_thought) if placed.opening else text)

    @staticmethod
    def release(placed: PlacedRequest) -> None:
        """Restore the track of a failed request."""
        placed.track.busy = False

    def trajectories(self, prompt_id: str, sample: int, answer: str | None = None) -> list[Trajectory]:
        """Return one trajectory per track, all of episode `sample`; `answer`, if given, replaces their text."""
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
                role=track.role,
                spans=tuple(track.spans),
                images=track.images,
                routed_experts=track.routes,
            )
            for track in self.tracks
        ]


def normal(message: Mapping[str, Any]) -> Message:
    """A client's message in hone's form (`hone.data.messages`), with known keys only."""
    found = normal_message(message if message.get("content") is not None else {**message, "content": ""}, lenient=True)
    kept = {key: found[key] for key in MESSAGE_KEYS if key in found}  # type: ignore[literal-required]
    if "tool_calls" in found:
        kept["tool_calls"] = [{"id": "", **call} for call in found["tool_calls"]]
    return cast(Message, kept)


def canonical(message: Mapping[str, Any]) -> Message:
    """A message for comparison: clients give answers back with other white space in their text and arguments."""
    found = normal(message)
    if found["role"] != "assistant":
        return found
    if not isinstance(found["content"], str):
        raise BadRequest("a message of the assistant takes text only, found an image", "unsupported")
    told = Message(role="assistant", content=found["content"].strip())
    if "tool_calls" in found:
        told["tool_calls"] = [{**call, "function": _canonical_call(call["function"])} for call in found["tool_calls"]]
    return told


def _canonical_call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": json.dumps(function["arguments"], sort_keys=True)}


__all__ = ["AgentSession", "AgentTask", "PlacedRequest", "Track", "canonical", "normal"]
