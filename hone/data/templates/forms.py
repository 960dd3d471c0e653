"""The form in which a chat template takes messages, found by rendering examples before the first step.

A template ignores what it does not know. So a field or role that no example shows is one that the model would never
see.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from hone.data.messages import RenderingError, Tools
from hone.types import Message

LOG = logging.getLogger("hone")

RenderFn = Callable[[Sequence[Message]], str | None]
"""Messages in the form of the template -> its text; None if it refuses them."""

Unrendered = Literal["error", "drop"]
"""Treatment of a field or a role of a message that the chat template does not render."""

QUESTION = Message(role="user", content="question")
EXAMPLE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {"name": "tool", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
)
THOUGHT = re.compile(r"[<\[◁]\|?(?P<end>/?)(?:seed:)?(?:think|thinking|thought|reasoning)\|?[>\]▷]", re.IGNORECASE)
"""A mark around a thought."""

_PROBE, _SAID, _RESULT = "answer-1b60f4", "text-5e07ab", "result-c3d902"
_ID = "call0000%d"  # of a call; Mistral's template takes nine letters and digits
_PROBES = re.compile(_PROBE + r"-(\d+)\.")
_PLACES = 256  # answers that are kept; one is some kB for a long conversation
_USUAL = ("user", "assistant", "tool")  # roles that templates show wherever they accept them
_THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")


class Ending(Protocol):
    """The ends of answers of one template; `hone.data.templates.ends.Ends` satisfies it."""

    @property
    def begin_next(self) -> bool: ...

    def of(self, message: Message) -> str: ...

    def is_of_call(self, token: str) -> bool: ...

    def as_learnt(self, answer: str) -> str: ...


class Rendering(Protocol):
    """The rendering of conversations by one template; `ChatTemplate` satisfies it."""

    text: str | None
    special: dict[str, int]  # text -> id of the special tokens
    specials: re.Pattern[str]  # any of them

    @property
    def ends(self) -> frozenset[int]: ...

    @property
    def ending(self) -> Ending: ...

    @property
    def opening(self) -> str: ...

    @property
    def opened_thought(self) -> str: ...

    def hides_thoughts(self, tools: Tools) -> bool: ...

    def render(self, messages: Sequence[Message], *, opening: bool, tools: Tools = (), template: str = "") -> str: ...

    def continuation(self, messages: Sequence[Message], tools: Tools) -> str: ...


@dataclass(frozen=True, slots=True)
class CallsForm:
    """The form of an answer with tool calls."""

    as_text: bool  # arguments as JSON text
    empty: str | None  # content of an answer that only calls


class TemplateForm:
    """The form in which one template takes messages.

    Most templates take text and calls with an object as arguments, some only parts, or arguments as JSON text.
    """

    def __init__(self, render: RenderFn, unrendered: Unrendered) -> None:
        self._render = render
        self._unrendered = unrendered
        self._lost: dict[str, bool] = {}  # role -> whether the template leaves its messages out
        self._misplaced: dict[str, tuple[int, str] | None] = {}  # shape of a conversation -> a fault

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the template's form. Raises RenderingError for a field or role that it does not show."""
        found = []
        for index, message in enumerate(messages):
            shown, hidden = self.shown(message)
            self._check(index, hidden)
            if self._unrendered == "error" and self._loses(message["role"]):
                raise RenderingError(
                    f"message {index} has the role {message['role']!r:.60}, and the chat template leaves such messages "
                    "out; write a role that it renders (user, assistant), set data.chat_template to one that renders "
                    "this one, or set data.chat.unrendered=drop"
                )
            found.append(shown)
        if self._unrendered == "error":
            self._check_places(found)
        return found

    def _check_places(self, messages: Sequence[Message]) -> None:
        """Raises RenderingError if the template does not show a message where it is, such as a late system prompt."""
        if all(message["role"] in _USUAL for message in messages[1:]):
            return
        # all that the probe keeps of them, except the texts of calls and thoughts
        shape = " ".join(
            f"{message['role']!r}{bool(message.get('content')):d}{'tool_calls' in message:d}" for message in messages
        )
        if shape in self._misplaced:
            found = self._misplaced[shape]
        else:
            text = self._render(self._probing(messages))
            if text is None:  # perhaps because of one of these texts: another conversation may tell
                return
            found = _misplaced(messages, text)
            if len(self._misplaced) >= _PLACES:
                self._misplaced.clear()
            self._misplaced[shape] = found
        if found is not None:
            index, fate = found
            raise RenderingError(
                f"message {index} has the role {messages[index]['role']!r:.60}, and the chat template {fate}; put "
                "its text into the first system message or into a message of the user, set data.chat_template to one "
                "that renders it in its place, or accept this with data.chat.unrendered=drop"
            )

    def _probing(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with the number of each message as its text, except where that is empty."""
        return [
            Message(**{**message, "content": self._content(f"{_PROBE}-{i}.")}) if message.get("content") else message
            for i, message in enumerate(messages)
        ]

    def _loses(self, role: str) -> bool:
        """Return whether the template takes messages of a role in some place, and shows them in none."""
        if role not in self._lost:
            one = Message(role=role, content=self._content(_PROBE))
            if role == "tool":
                one = Message(**one, name="tool", tool_call_id="call00000")
            said = Message(role="assistant", content=self._content("said"))
            called = self.shown(calling([one], "value"))[0]
            places: list[list[Message]] = [[one, QUESTION], [one], [QUESTION, one], [QUESTION, said, one]]
            places += [[QUESTION, called, one]] if role == "tool" else []
            texts = [text for place in places if (text := self._render(place)) is not None]
            self._lost[role] = bool(texts) and not any(_PROBE in text for text in texts)
        return self._lost[role]

    def check_plain(self, messages: Sequence[Message]) -> None:
        """Raises RenderingError for a field that is not shown where contents are joined without a template."""
        for index, message in enumerate(messages):
            self._check(index, [name for name in ("tool_calls", "reasoning_content") if message.get(name)])

    def _check(self, index: int, hidden: Sequence[str]) -> None:
        if hidden and self._unrendered == "error":
            raise RenderingError(
                f"message {index} has {' and '.join(hidden)}, which the chat template does not render; set "
                "data.chat_template to one that does, remove the field from the data, or set data.chat.unrendered=drop"
            )

    def shown(self, message: Message) -> tuple[Message, list[str]]:
        """A message in the template's form, and the names of its fields that the template does not show."""
        found: dict[str, Any] = {key: value for key, value in message.items() if key != "trainable"}
        hidden = []
        if "reasoning_content" in found:
            thought = found.pop("reasoning_content")
            if self._thought is None:
                hidden.append("reasoning_content")
            else:
                found[self._thought] = thought
        if calls := found.pop("tool_calls", None):
            if self._calls is None:
                hidden.append("tool_calls")
            else:
                found["tool_calls"] = [_with_arguments(call, self._calls.as_text) for call in calls]
                if len(calls) > 1 and self._hides_second_call:
                    hidden.append("more than one call in tool_calls")
                if found.get("content") and self._loses_text_of_calls:
                    hidden.append("text before its tool_calls")
                    found["content"] = ""
                found["content"] = found.get("content") or self._calls.empty
        if isinstance(found.get("content"), str):
            found["content"] = self._content(found["content"])
        return Message(**found), hidden  # type: ignore[typeddict-item]

    def _content(self, text: str) -> Any:
        """A text in the template's form."""
        return [{"type": "text", "text": text}] if self.takes_parts_only else text

    @cached_property
    def takes_parts_only(self) -> bool:
        """True if a text is lost unless it is a part."""
        parts = [{"type": "text", "text": _PROBE}]
        return not self._shows(Message(role="user", content=_PROBE)) and self._shows(
            Message(role="user", content=parts)
        )

    def _shows(self, message: Message) -> bool:
        return _PROBE in (self._render([message]) or "")

    @property
    def hides_thoughts(self) -> bool:
        """True if the template does not show `reasoning_content`."""
        return self._thought is None

    @cached_property
    def _thought(self) -> str | None:
        """The name of the field of thoughts; None if the template shows none."""
        for name in _THOUGHT_FIELDS:
            answer: Any = {"role": "assistant", "content": self._content("said"), name: _PROBE}
            if _PROBE in (self._render([QUESTION, answer]) or ""):
                return name
        return None

    @cached_property
    def _calls(self) -> CallsForm | None:
        """The form of calls; None if the template shows none."""
        forms = [CallsForm(as_text, empty) for as_text in (False, True) for empty in ("", None)]
        tried = [(form, self._render([QUESTION, self._calling(form, 1)]) or "") for form in forms]
        shown = [(form, text) for form, text in tried if _PROBE in text and "hone_value" in text]
        exact = [form for form, text in shown if "'hone_key'" not in text and '\\"hone_key' not in text]
        return next(iter(exact or [form for form, _ in shown]), None)

    @cached_property
    def _loses_text_of_calls(self) -> bool:
        """True if the template does not show an answer's text and its calls, both before the calls' results.

        hone warns once of a text that comes after the calls and before their results: the model learns it there.
        """
        text = self._called(1, self._content(_SAID))
        said, call = text.find(_SAID), text.find(_PROBE)
        end = text.find(_RESULT) if _RESULT in text else len(text)
        if call < said < end:
            LOG.warning("the chat template renders the text of an answer after its tool_calls, where it is learnt, too")
        return not (-1 < said < end and -1 < call < end)

    @cached_property
    def _hides_second_call(self) -> bool:
        """True if the template shows only one of an answer's calls."""
        return f"{_PROBE}-1" not in self._called(2)

    def _called(self, count: int, said: Any = "") -> str:
        """An example of calls with the results that follow them, if the template takes those."""
        assert self._calls is not None
        answer = self._calling(self._calls, count, said)
        results = [
            Message(role="tool", content=self._content(_RESULT), name=f"{_PROBE}-{number}", tool_call_id=_ID % number)
            for number in range(count)
        ]
        return self._render([QUESTION, answer, *results]) or self._render([QUESTION, answer]) or ""

    def _calling(self, form: CallsForm, count: int, said: Any = "") -> Message:
        """An answer with calls in this form, whose names end with their numbers."""
        calls = [
            {
                "id": _ID % number,
                "type": "function",
                "function": {"name": f"{_PROBE}-{number}", "arguments": {"hone_key": "hone_value"}},
            }
            for number in range(count)
        ]
        shown = [_with_arguments(call, form.as_text) for call in calls]
        return Message(role="assistant", content=said or form.empty, tool_calls=shown)


def _misplaced(messages: Sequence[Message], text: str) -> tuple[int, str] | None:
    """The first message that the rendered probe of a conversation does not show in its place, and its fate."""
    at: dict[int, int] = {}  # message -> its first place in the text
    for probe in _PROBES.finditer(text):
        at.setdefault(int(probe[1]), probe.start())
    reached = -1  # by the messages so far
    for i, message in enumerate(messages):
        if i and message["role"] not in _USUAL and message.get("content"):
            if i not in at:
                return i, "leaves it out there"
            if messages[0]["role"] not in _USUAL and messages[0].get("content") and 0 not in at:
                return i, "then leaves out message 0"
            if at[i] < reached:
                return i, "moves it before earlier messages"
        reached = max(reached, at.get(i, -1))
    return None


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def calling(messages: Sequence[Message], value: str) -> Message:
    """An answer that calls the tools that `messages` answer for, with `value` as its argument."""
    calls = [
        {
            "id": message.get("tool_call_id", "call00000"),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {"value": value}},
        }
        for message in messages
        if message.get("role") == "tool"
    ]
    return Message(role="assistant", content="", tool_calls=calls)


def template_texts(tokenizer: Any, chosen: str) -> tuple[str | None, str | None]:
    """The templates without and with tools: the chosen text or file, else the tokenizer's own.

    A tokenizer may have several: its `default`, and `tool_use` for conversations with tools. Raises RenderingError if
    there is no such file, it is not text, or there is no default.
    """
    if chosen and ("{%" in chosen or "{{" in chosen):
        return chosen, chosen
    if chosen:
        if not Path(chosen).is_file():
            raise RenderingError(
                f"data.chat_template: no file {chosen} (a template itself would contain '{{%' or '{{{{')"
            )
        try:
            text = Path(chosen).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RenderingError(
                f"data.chat_template: {chosen} is not text in UTF-8 ({error.reason} at byte {error.start}); name a "
                "file with a Jinja template"
            ) from error
        return text, text
    if not tokenizer.chat_template:
        return None, None
    try:
        return str(tokenizer.get_chat_template()), str(tokenizer.get_chat_template(tools=list(EXAMPLE_TOOLS)))
    except ValueError as error:
        raise RenderingError(f"set data.chat_template: {error}") from error


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of every token that ordinary text cannot give."""
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def marks_only_the_first_word(tokenizer: Any) -> bool:
    """Return whether the tokenizer adds a word-boundary mark to the beginning of a text, and nowhere else.

    That is SentencePiece's `prepend_scheme: first`: a text tokenised in pieces would get a mark for each piece.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    step = json.loads(backend.to_str())["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    return any(one.get("type") == "Metaspace" and one.get("prepend_scheme") == "first" for one in steps)
