"""`ChatTemplate`: messages to text by a model's chat template, and where answers begin and end in that text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import jinja2

from hone.config import ConfigError
from hone.data.images import without_images
from hone.types import Message

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the functions that a model may call, as chat templates take them."""

_EXAMPLE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {"name": "tool", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
)
_THOUGHT_MARKS = ("<think>", "[THINK]", "<seed:think>", "◁think▷", "<|think|>")
_QUESTION = Message(role="user", content="question")
_PROBE = "answer-1b60f4"
_THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_ANSWER = "answer-7f3d9c"  # stands for an answer in a rendered example; no template has a reason to touch it
_ENDLESS = (  # what a template renders, without the last end token if only white space follows it
    "{% set hone_whole %}WHOLE{% endset %}{% set hone = namespace(said=hone_whole) %}"
    "{% if not add_generation_prompt %}{% for end in ENDS %}{% set cut = hone_whole.rsplit(end, 1) %}"
    "{% if cut | length == 2 and not cut[1].strip() %}{% set hone.said = cut[0] %}{% endif %}"
    "{% endfor %}{% endif %}{{ hone.said }}"
)
GUARD = "\ue0f2"  # a private-use character that stands within text that must not become a special token
_ESCAPED_GUARD = "\\ue0f2"  # as Python prints it, and JSON of ASCII
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"  # private-use characters around what `{% generation %}` marks
_FIRST_NUMBER = 0x100000  # private-use characters from here stand for the number of a message
_NUMBERED = re.compile(f"[{chr(_FIRST_NUMBER)}-{chr(0x10FFFD)}]")
_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_MARKED = (
    rf'{{%\1 filter replace("", "{_OPEN}", 1) | reverse | replace("", "{_CLOSE}", 1) | reverse \2%}}',
    r"{%\1 endfilter \2%}",
)


RenderFn = Callable[[Sequence[Message]], str | None]
"""Messages in the form of the template -> its text; None if it refuses them."""


class RenderingError(ConfigError):
    """Messages that a chat template cannot render, or whose answers cannot be found in the rendered text."""


Unrendered = Literal["error", "drop"]
"""What becomes of a field of an answer that the chat template does not render."""


class ChatTemplate:
    """The chat template of one tokenizer; without one, the contents of the messages are joined as they are."""

    def __init__(
        self, tokenizer: Any, chosen: str, options: Mapping[str, Any], unrendered: Unrendered = "error"
    ) -> None:
        """`chosen` is Jinja2 text or a file of it, empty: the tokenizer's own; `options` are variables for it.

        Raises RenderingError if there is no such file, or if options are given to a tokenizer without a template.
        """
        self.text, self.text_with_tools = _template_texts(tokenizer, chosen)
        self._unrendered = unrendered
        self._forms: dict[bool, TemplateForm] = {}  # by whether there are tools
        self._ends: dict[bool, int | None] = {}
        self._tokenizer = tokenizer
        self._options = dict(options)
        if self.text is None and options:
            raise RenderingError(f"chat_options {sorted(options)} are set, but the tokenizer has no chat template")
        self.special = _special_tokens(tokenizer)
        self._specials = re.compile("|".join(re.escape(text) for text in sorted(self.special, key=len)[::-1]))

    def render(self, messages: Sequence[Message], *, opening: bool, tools: Tools = (), template: str = "") -> str:
        """The text of a conversation; with `opening`, the opening of the next answer is added.

        Raises RenderingError for messages that the template refuses, or of which it would leave something out.
        """
        if not is_text(messages):
            messages = without_images(messages)
        if self.text is None:
            for index, message in enumerate(messages):
                self._check_hidden(index, [name for name in ("tool_calls", "reasoning_content") if message.get(name)])
            return "".join(_plain_content(message) for message in messages)
        fitted = []
        for index, message in enumerate(messages):
            shown, hidden = self._form(tools).fitted(message)
            self._check_hidden(index, hidden)
            fitted.append(shown)
        return self._rendered(fitted, opening, tools, template)

    def _rendered(self, messages: Sequence[Message], opening: bool, tools: Tools, template: str = "") -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=template or self._text(tools),
                add_generation_prompt=opening,
                tokenize=False,
                **self._options,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise RenderingError(f"the chat template cannot render {_roles(messages)}: {error}") from error
        return str(text).replace(_ESCAPED_GUARD, GUARD)

    def _text(self, tools: Tools) -> str | None:
        return self.text_with_tools if tools else self.text

    def _form(self, tools: Tools) -> TemplateForm:
        if bool(tools) not in self._forms:

            def render(messages: Sequence[Message]) -> str | None:
                with suppress(RenderingError):
                    return self._rendered(messages, False, tools)
                return None

            self._forms[bool(tools)] = TemplateForm(render)
        return self._forms[bool(tools)]

    def _check_hidden(self, index: int, hidden: Sequence[str]) -> None:
        if hidden and self._unrendered == "error":
            raise RenderingError(
                f"message {index} has {' and '.join(hidden)}, which the chat template does not render; set "
                "data.chat_template to one that does, remove the field from the data, or set data.unrendered=drop"
            )

    def pieces(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, int | None]]:
        """A conversation as (text, number of the message whose answer it is, None: no answer).

        Nothing is rendered after the last answer. The template's `{% generation %}` marks say what an answer is, if it
        has them. Otherwise an answer is what the template adds to the opening of that answer.
        """
        text = self._text(tools)
        if text is not None and _GENERATION.search(text):
            return self._marked_pieces(text, messages, tools)
        return self._grown_pieces(messages, tools)

    def continuation(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text between an answer's end token and the next answer.

        It is found by rendering an example with a placeholder for the answer, so the generated text is not needed.
        """
        if self.text is None:
            return self.render(messages, opening=True)
        asked = Message(role="user", content="question")
        try:
            text = self.render(
                [asked, Message(role="assistant", content=_ANSWER), *messages], opening=True, tools=tools
            )
        except RenderingError:  # some templates take a tool's message after a call of that tool only
            if not any(message.get("role") == "tool" for message in messages):
                raise
            text = self._rendered(
                [self._form(tools).fitted(one)[0] for one in (asked, _calling(messages), *messages)], True, tools
            )
        _, found, after = text.rpartition(_ANSWER)
        end = self._specials.search(after)
        if not found or end is None or not self._ends_answer(end.group(), after[: end.start()], tools):
            raise RenderingError(f"the chat template renders no end token between an answer and {_roles(messages)}")
        return after[end.end() :]

    def end_or_none(self, tools: Tools = ()) -> int | None:
        """The special token that ends an answer in a rendered example; without a template, the end of a sequence."""
        if self.text is None:
            return None if self._tokenizer.eos_token_id is None else int(self._tokenizer.eos_token_id)
        if bool(tools) not in self._ends:
            example = [Message(role="user", content="question"), Message(role="assistant", content=_ANSWER)]
            _, found, after = self.render(example, opening=False, tools=tools).rpartition(_ANSWER)
            end = self._specials.match(after.lstrip()) if found and self.special else None
            self._ends[bool(tools)] = self.special[end.group()] if end else None
        return self._ends[bool(tools)]

    def end_with(self, tools: Tools = ()) -> int:
        """The token that ends an answer. Raises RenderingError if there is none."""
        end = self.end_or_none(tools)
        if end is None:
            raise RenderingError(
                "the chat template (or, without one, the tokenizer) ends an answer with no special token, so a model "
                "could not learn to stop; set chat_template to a template that renders one"
            )
        return end

    @property
    def end(self) -> int:
        """The token that ends an answer where there are no tools. Raises RenderingError if there is none."""
        return self.end_with()

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer: the template's end of a turn, and the tokenizer's end of a sequence."""
        found = {self.end_or_none(), self._tokenizer.eos_token_id}
        if self.text_with_tools != self.text:
            found.add(self.end_or_none(_EXAMPLE_TOOLS))
        return frozenset(end for end in found if end is not None)

    @cached_property
    def opened_thought(self) -> str:
        """The mark of a thought with which the template begins every answer, "" for none.

        The policy writes the rest, so its own tokens hold the end of the thought without its beginning.
        """
        if self.text is None:
            return ""
        asked = self.render([Message(role="user", content="question")], opening=True)
        begin = max(asked.rfind(mark) for mark in _THOUGHT_MARKS)
        return asked[begin:] if begin >= 0 and not asked[begin:].strip().rpartition("</")[1] else ""

    def endless(self, first: str) -> str:
        """A template that renders the same, but stops before the end token of a finished conversation.

        `first` is the text of the tokenizer's first token, where it has one and no template.
        """
        ends = [self._tokenizer.convert_ids_to_tokens(end) for end in sorted(self.ends)]
        plain = f"{{{{ {first!r} }}}}{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}"
        whole = plain if self.text is None else self.text.removesuffix("\n")
        return _ENDLESS.replace("WHOLE", whole).replace("ENDS", repr(ends))

    def _grown_pieces(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, int | None]]:
        """Pieces from renderings of the conversation as it grows.

        For each answer the template renders everything before it with the opening of an answer, and everything up to
        it. The second must begin with the first, and the rest of it is the answer.
        """
        pieces: list[tuple[str, int | None]] = []
        grown, previous = "", -1
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            opened = self.render(messages[:index], opening=True, tools=tools)
            answered = self.render(messages[: index + 1], opening=False, tools=tools)
            if not answered.startswith(opened):
                raise RenderingError(_differs(index, opened, answered))
            if opened.startswith(grown):
                between = opened[len(grown) :]
            else:  # the template rewrites earlier turns: keep them, and render what is new
                between = self.continuation(messages[previous + 1 : index], tools)
            answer = self._cut_after_end(answered[len(opened) :], index)
            pieces += [(between, None), (answer, index)]
            grown, previous = opened + answer, index
        return pieces

    def _marked_pieces(self, text: str, messages: Sequence[Message], tools: Tools) -> list[tuple[str, int | None]]:
        """Pieces of the whole rendered conversation, cut at the template's generation marks.

        A template may mark some answers only, so each answer carries the number of its message as a character.
        """
        marked = _END_GENERATION.sub(_MARKED[1], _GENERATION.sub(_MARKED[0], text))
        numbered = [
            _numbered(one, index) if one.get("role") == "assistant" else one for index, one in enumerate(messages)
        ]
        whole = self.render(numbered, opening=False, tools=tools, template=marked)
        pieces: list[tuple[str, int | None]] = []
        before, *rest = whole.split(_OPEN)
        number = next((index for index, one in enumerate(messages) if one.get("role") == "assistant"), 0)
        for part in rest:
            answer, _, after = part.partition(_CLOSE)
            end = self._specials.match(after, len(after) - len(after.lstrip()))
            if end and self.special[end.group()] in self.ends and not self._ended(answer):  # the marks leave it out
                answer, after = answer + after[: end.end()], after[end.end() :]
            if found := _NUMBERED.search(answer):
                number = ord(found[0]) - _FIRST_NUMBER
            length = self._ended(answer) or len(answer)
            pieces += [(before, None), (answer[:length], number)]
            before = answer[length:] + after
        if not pieces:
            raise RenderingError("the chat template has generation marks, but marks nothing in these messages")
        return [(_NUMBERED.sub("", piece), of) for piece, of in pieces]

    def _ended(self, answer: str) -> int | None:
        """The length of a rendered answer with the token that ends it, None without one.

        Templates such as Phi-3's render another token after the end of the last answer, which no rollout has.
        """
        for found in self._specials.finditer(answer) if self.special else ():
            rest = self._specials.sub("", answer[found.end() :])
            if self.special[found.group()] in self.ends and not rest.strip():
                return found.end()
        return None

    def _cut_after_end(self, answer: str, index: int) -> str:
        """A rendered answer up to the token that ends it: the first end token, or else the last special token."""
        if self.text is None:
            return answer
        length = self._ended(answer)
        if length is not None:
            return answer[:length]
        ends = list(self._specials.finditer(answer))
        if not ends or answer[ends[-1].end() :].strip():
            raise RenderingError(f"message {index}: the chat template renders no end token after {answer[-60:]!r}")
        return answer[: ends[-1].end()]

    def _ends_answer(self, token: str, before: str, tools: Tools) -> bool:
        """Return whether a special token that follows `before` ends an answer in the middle of a conversation.

        Some templates (gpt-oss) render a finished answer with another end token than the model generated. A token that
        begins a conversation begins a message, and ends none.
        """
        if self.special[token] == self.end_with(tools):
            return True
        begins = self.render([Message(role="user", content="question")], opening=False).lstrip()
        return not before.strip() and not begins.startswith(token)


@dataclass(frozen=True, slots=True)
class CallsForm:
    """How a template takes an answer with tool calls."""

    as_text: bool  # arguments as JSON text
    empty: str | None  # content of an answer that only calls


class TemplateForm:
    """The form in which one template takes messages. Examples are rendered to find it when a message needs it.

    Most templates take text and calls with an object as arguments, some only parts, or arguments as JSON text. A
    template ignores what it does not know, so a field that no form shows is named.
    """

    def __init__(self, render: RenderFn) -> None:
        self._render = render

    def fitted(self, message: Message) -> tuple[Message, tuple[str, ...]]:
        """The message in the template's form, and the names of its fields that the template does not show."""
        found: dict[str, Any] = {key: value for key, value in message.items() if key != "trainable"}
        hidden: list[str] = []
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
                found["content"] = found.get("content") or self._calls.empty
        if isinstance(found.get("content"), str) and self._takes_parts_only:
            found["content"] = [{"type": "text", "text": found["content"]}]
        return Message(**found), tuple(hidden)  # type: ignore[typeddict-item]

    @cached_property
    def _takes_parts_only(self) -> bool:
        """Whether a text is lost unless it is a part."""
        parts = [{"type": "text", "text": _PROBE}]
        return not self._shows(Message(role="user", content=_PROBE)) and self._shows(
            Message(role="user", content=parts)
        )

    def _shows(self, message: Message) -> bool:
        return _PROBE in (self._render([message]) or "")

    @cached_property
    def _thought(self) -> str | None:
        """The name of the field of thoughts; None if the template shows none."""
        content: Any = [{"type": "text", "text": "said"}] if self._takes_parts_only else "said"
        for name in _THOUGHT_FIELDS:
            answer: Any = {"role": "assistant", "content": content, name: _PROBE}
            if _PROBE in (self._render([_QUESTION, answer]) or ""):
                return name
        return None

    @cached_property
    def _calls(self) -> CallsForm | None:
        """The form of calls; None if the template shows none."""
        forms = [CallsForm(as_text, empty) for as_text in (False, True) for empty in ("", None)]
        shown = [(form, text) for form in forms if _PROBE in (text := self._called(form)) and "hone_value" in text]
        exact = [form for form, text in shown if "'hone_key'" not in text and '\\"hone_key' not in text]
        return next(iter(exact or [form for form, _ in shown]), None)

    def _called(self, form: CallsForm) -> str:
        """An example of a call in this form."""
        function = {"name": _PROBE, "arguments": {"hone_key": "hone_value"}}
        call = _with_arguments({"id": "call00000", "type": "function", "function": function}, form.as_text)
        return self._render([_QUESTION, Message(role="assistant", content=form.empty, tool_calls=[call])]) or ""


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


class Guard:
    """Marks text that is not the template's wherever it looks like a token of the tokenizer, so that it stays text.

    In what others say every special token is marked, in results of tools and the names and arguments of calls also
    other tokens that a tokenizer adds. The policy's own words may hold such tokens (`<think>`), but none that frames a
    message: what begins or ends one, and those of the tokenizer itself.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._added = _any_of(added)
        frame = _framing(template, tokenizer, self._added)
        self._framing = _any_of(frame)
        self._special = _any_of(frame | set(template.special))

    def message(self, message: Message) -> Message:
        """The message with a mark in everything that looks like a token; see `GUARD`."""
        role = message.get("role")
        others = self._added if role in ("tool", "assistant") else self._special
        guarded: dict[str, Any] = {}
        for key, value in message.items():
            own = role == "assistant" and key in ("content", "reasoning_content")
            guarded[key] = _marked(value, self._framing if own else others)
        return cast(Message, guarded)

    def tools(self, tools: Tools) -> Tools:
        """JSON schemas with the same marks in their names, keys and descriptions."""
        return [_marked(tool, self._added) for tool in tools]

    def said(self, text: str) -> str:
        """A text of the policy."""
        return str(_marked(text, self._framing))

    def told(self, text: str) -> str:
        """A text of a tool."""
        return str(_marked(text, self._added))


def _framing(template: ChatTemplate, tokenizer: Any, added: re.Pattern[str] | None) -> set[str]:
    """The tokens that frame a message, and the tokenizer's own."""
    own = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token} - {None}
    if template.text is None or added is None:
        return own
    try:
        example = template.render([Message(role="user", content="question")], opening=True)
        ends = {text for text, number in template.special.items() if number in template.ends}
    except RenderingError:  # it takes other conversations only
        example, ends = "".join(template.special), set()
    frame = {found for found in added.findall(example) if "think" not in found.casefold()}
    return own | ends | frame


def _marked(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """The value with a mark after the first character of each match in its texts and keys."""
    if isinstance(value, str):
        text = value.replace(GUARD, "")
        return text if pattern is None else pattern.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)
    if isinstance(value, Mapping):
        return {_marked(key, pattern): _marked(one, pattern) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(one, pattern) for one in value]
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of any of these texts of two characters or more, the longest first."""
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _numbered(message: Message, index: int) -> Message:
    """An answer whose texts end with the character that stands for its number."""
    if index > 0x10FFFD - _FIRST_NUMBER:
        raise RenderingError(f"a conversation of more than {0x10FFFD - _FIRST_NUMBER} messages is not supported")
    number, changed = chr(_FIRST_NUMBER + index), dict(message)
    for key in ("content", "reasoning_content"):
        text = message.get(key)
        if isinstance(text, str) and text.strip():
            changed[key] = text.rstrip() + number + text[len(text.rstrip()) :]
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "name": call["function"]["name"] + number}}
            for call in message["tool_calls"]
        ]
    return cast(Message, changed)


def encodable(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone, which no tokenizer takes.

    JSON may contain one (`"\\ud83d"`), and so may the name of a file in Python.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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


def _template_texts(tokenizer: Any, chosen: str) -> tuple[str | None, str | None]:
    """The templates without and with tools: the chosen text or file, else the tokenizer's own.

    A tokenizer may have several: its `default`, and `tool_use` for conversations with tools.
    """
    if chosen and ("{%" in chosen or "{{" in chosen):
        return chosen, chosen
    if chosen:
        if not Path(chosen).is_file():
            raise RenderingError(f"chat_template: no file {chosen} (a template itself would contain '{{%' or '{{{{')")
        text = Path(chosen).read_text(encoding="utf-8")
        return text, text
    if not tokenizer.chat_template:
        return None, None
    try:
        return str(tokenizer.get_chat_template()), str(tokenizer.get_chat_template(tools=list(_EXAMPLE_TOOLS)))
    except ValueError as error:
        raise RenderingError(f"set chat_template: {error}") from error


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of every token that ordinary text cannot give."""
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def is_text(messages: Sequence[Message]) -> bool:
    """Return whether no message has parts, such as images."""
    return all(isinstance(message.get("content"), str | None) for message in messages)


def _plain_content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RenderingError(f"without a chat template a message's content should be text, found {content!r:.60}")
    return content


def _calling(messages: Sequence[Message]) -> Message:
    """An answer that calls the tools that `messages` answer for."""
    calls = [
        {
            "id": message.get("tool_call_id", "call00000"),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {"value": _ANSWER}},
        }
        for message in messages
        if message.get("role") == "tool"
    ]
    return Message(role="assistant", content="", tool_calls=calls)


def _roles(messages: Sequence[Message]) -> str:
    return "the roles " + ", ".join(str(message.get("role")) for message in messages)


def _differs(index: int, opened: str, answered: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(opened, answered, strict=False)) if a != b), len(answered))
    return (
        f"message {index}: the chat template does not render the answer after its own opening (it opens with "
        f"{opened[at : at + 40]!r} where the answer has {answered[at : at + 40]!r}), so the tokens to learn cannot be "
        "found; use a template with {% generation %} marks, or other chat_options"
    )
