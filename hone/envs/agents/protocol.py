"""A request and its answers, whatever their form on the wire: shared by the endpoint's protocols.

    body --Dialect.read--> ChatRequest or TextRequest --endpoint--> Reply --Dialect.whole or .stream--> body

`completions` (OpenAI's Chat Completions and Completions), `responses` (OpenAI's Responses) and `anthropic_messages`
are the dialects. A request for something that hone cannot do is refused with the name of its field.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hone.types import Completion, SamplingParams, StopReason

PIECE = 24  # characters per chunk of a stream
MOST_ALTERNATIVES = 20  # tokens at a place of a prompt
MOST_IDS = 1 << 31  # of any tokenizer; engines check against their own vocabulary


class BadRequest(ValueError):
    """A request that cannot be served; `code` is for programs."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    return_token_ids: bool = False

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, of_run: SamplingParams, budget: int, own: bool) -> SamplingParams:
        """Return the run's sampling with this request's length and stop strings; if `own`, also its temperature, ..."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        changes: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None} if own else {}
        return replace(
            of_run,
            max_tokens=min(self.longest or budget, budget),
            stop=tuple(dict.fromkeys((*of_run.stop, *self.stops))),
            **changes,
        )


class ChatRequest(_Request):
    """Messages to continue; a dialect converts its own form to that of Chat Completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = False
    max_completion_tokens: int | None = Field(None, ge=1)
    json_schema: str = ""  # see `schema_of`

    @model_validator(mode="after")
    def _known_choice(self) -> ChatRequest:
        if self.json_schema and self.offered:
            raise ValueError(
                "an answer that follows a JSON schema (response_format) can call no tool; leave out one of them"
            )
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("auto", "none", "required"):
            raise ValueError(f"tool_choice = {self.tool_choice!r:.80} should be auto, none, required or a function")
        if self.called is not None and not self.tools:
            raise ValueError("tool_choice asks for a call, but there are no tools")
        names = [one.get("function", {}).get("name") for one in self.tools or ()]
        if self.called and self.called not in names:
            raise ValueError(f"tool_choice names {self.called!r:.80}, but the tools are {names!r:.200}")
        return self

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def called(self) -> str | None:
        """The tool that has to be called; "": any of them; None: none has to."""
        if isinstance(self.tool_choice, Mapping):
            try:
                return str(self.tool_choice["function"]["name"])
            except (KeyError, TypeError) as error:
                raise ValueError(f"tool_choice = {self.tool_choice!r:.80} is not supported") from error
        return "" if self.tool_choice == "required" else None

    def sampling(self, of_run: SamplingParams, budget: int, own: bool) -> SamplingParams:
        return replace(super().sampling(of_run, budget, own), json_schema=self.json_schema)


class TextRequest(_Request):
    """A text to continue; the prompt is either text or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool | None = False

    @model_validator(mode="after")
    def _possible(self) -> TextRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError(
                "max_tokens = 0 samples nothing: set echo = true to get the prompt's log-probs, or 1 or more"
            )
        if (self.logprobs or 0) > 1 and not self.echo:
            raise ValueError(
                f"logprobs = {self.logprobs}: only tokens of a prompt have alternatives (echo = true); set 1 for the "
                "log-probs of sampled tokens"
            )
        return self

    @property
    def only_prompt(self) -> str | list[int]:
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise BadRequest("one prompt in a request: an agent's requests are recorded in their order")
            prompt = prompt[0]
        if not prompt:
            raise BadRequest("the prompt is empty")
        if not isinstance(prompt, str) and (odd := [one for one in prompt if not 0 <= one < MOST_IDS]):  # type: ignore[operator]
            raise BadRequest(f"the prompt has the token id {odd[0]!r:.80}, and ids are from 0 to {MOST_IDS - 1}")
        return prompt  # type: ignore[return-value]

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to return at each place of the prompt; None: do not score the prompt."""
        return self.logprobs if self.echo else None


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a reply: the text without stop string and tool calls, and what was sampled."""

    completion: Completion
    text: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    tokens: tuple[str, ...] = ()  # the text of each sampled token, if log-probs were asked for
    stopped_by: str | None = None  # the stop string of the request that ended it

    @property
    def cut(self) -> bool:
        """Return whether the limit of tokens ended it."""
        return self.completion.stop_reason is StopReason.LENGTH

    @property
    def message(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            told |= {"content": self.text or None, "tool_calls": list(self.tool_calls)}
        return told


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt in the answer to a text request; the lists have an entry for each token, if it asks for log-probs."""

    text: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float | None, ...] = ()  # None: of the first
    top: tuple[dict[str, float] | None, ...] | None = None  # the most likely tokens and the prompt's own


@dataclass(frozen=True, slots=True)
class Reply:
    """All answers to one request."""

    request: ChatRequest | TextRequest
    answers: Sequence[Answer]
    prompt_tokens: int
    echo: Echo | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def model(self) -> str:
        return self.request.model or "policy"

    @property
    def sampled_tokens(self) -> int:
        return sum(len(answer.completion.token_ids) for answer in self.answers)

    def sampled(self, answer: Answer) -> dict[str, Any]:
        """The sampled ids and their weight versions, if the request asks for them by `return_token_ids`."""
        if not self.request.return_token_ids:
            return {}
        one = answer.completion
        return {"token_ids": list(one.token_ids), "weight_versions": list(one.weight_versions)}


class Dialect(Protocol):
    """A protocol as the endpoint speaks it; `whole` and `stream` tell exactly what was recorded."""

    def read(self, data: Any) -> ChatRequest | TextRequest:
        """Raises BadRequest or ValueError for what hone cannot do."""

    def whole(self, reply: Reply) -> dict[str, Any]: ...

    def stream(self, reply: Reply) -> Iterator[str]:
        """Server-sent events of a complete answer."""

    def error(self, message: str, status: int, code: str) -> dict[str, Any]: ...


def supported(
    body: Any, neutral: Mapping[str, Sequence[Any]], without_effect: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Return the fields of a request that matter.

    Leaves out `without_effect`, and `neutral` fields, which may have only the given values. Raises BadRequest for a
    field that asks for something unsupported.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"a request is a JSON object, found {body!r:.60}")
    for name, allowed in neutral.items():
        if body.get(name) not in allowed:
            raise BadRequest(f"{name} = {body[name]!r:.80} is not supported; leave it out", "unsupported")
    return {key: value for key, value in body.items() if key not in neutral and key not in without_effect}


def form_in(fields: Any, name: str) -> Any:
    """The `format` of an answer in the field `name` of a request. Raises BadRequest for other fields that are set."""
    if not isinstance(fields, dict | None):
        raise BadRequest(f"{name} should be a JSON object, found {fields!r:.60}")
    for key, value in (fields or {}).items():
        if key != "format" and value is not None:
            raise BadRequest(f"{name}.{key} = {value!r:.80} is not supported; leave it out", "unsupported")
    return (fields or {}).get("format")


def schema_of(form: Any, name: str, key: str = "") -> str:
    """The JSON schema of the form of an answer, as text; empty: the answer is free. Raises BadRequest.

    `name`: the request's field that has the form. `key`: the field that has `schema` within it; empty: `form` itself.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return ""
    if kind == "json_object":
        return json.dumps({"type": "object"})
    if kind != "json_schema":
        raise BadRequest(f"{name} should be of type text, json_object or json_schema, found {form!r:.80}")
    holder = form.get(key) if key else form
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise BadRequest(f"{'.'.join(filter(None, (name, key)))} should have a schema, found {form!r:.80}")
    return json.dumps(schema)


def openai_error(message: str, status: int, code: str) -> dict[str, Any]:
    """The body of a refusal in OpenAI's protocols."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def text_of(content: Any, kinds: Collection[str], what: str) -> str:
    """The text of a content that is text, or a list of text parts of these `kinds`. Raises BadRequest for others."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise BadRequest(f"{what} takes text only, found {part!r:.80}", "unsupported")
    return "".join(part["text"] for part in parts)


def pieces(text: str) -> Iterator[str]:
    """The parts of a text as a stream sends them."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def event(data: Mapping[str, Any], name: str = "") -> str:
    """One server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


__all__ = [
    "Answer",
    "BadRequest",
    "ChatRequest",
    "Dialect",
    "Echo",
    "Reply",
    "TextRequest",
    "event",
    "form_in",
    "openai_error",
    "pieces",
    "schema_of",
    "supported",
    "text_of",
]
