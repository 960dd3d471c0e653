"""`ChatTemplate`: messages to text by a model's chat template, and where answers begin and end in that text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from hone.config import ConfigError
from hone.data.images import without_images
from hone.types import Message

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the functions that a model may call, as chat templates take them."""

_ANSWER = "answer-7f3d9c"  # stands for an answer in a rendered example; no template has a reason to touch it
_ENDLESS = (  # what a template renders, without the last end token if only white space follows it
    "{% set hone_whole %}WHOLE{% endset %}{% set hone = namespace(said=hone_whole) %}"
    "{% if not add_generation_prompt %}{% for end in ENDS %}{% set cut = hone_whole.rsplit(end, 1) %}"
    "{% if cut | length == 2 and not cut[1].strip() %}{% set hone.said = cut[0] %}{% endif %}"
    "{% endfor %}{% endif %}{{ hone.said }}"
)
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"  # private-use characters around what `{% generation %}` marks
_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_MARKED = (
    rf'{{%\1 filter replace("", "{_OPEN}", 1) | reverse | replace("", "{_CLOSE}", 1) | reverse \2%}}',
    r"{%\1 endfilter \2%}",
)


class RenderingError(ConfigError):
    """Messages that a chat template cannot render, or whose answers cannot be found in the rendered text."""


class ChatTemplate:
    """The chat template of one tokenizer; without one, the contents of the messages are joined as they are."""

    def __init__(self, tokenizer: Any, chosen: str, options: Mapping[str, Any]) -> None:
        """`chosen` is Jinja2 text or a file of it, empty: the tokenizer's own; `options` are variables for it.

        Raises RenderingError if there is no such file, or if options are given to a tokenizer without a template.
        """
        self.text = _template_text(tokenizer, chosen)
        self._tokenizer = tokenizer
        self._options = dict(options)
        if self.text is None and options:
            raise RenderingError(f"chat_options {sorted(options)} are set, but the tokenizer has no chat template")
        self.special = _special_tokens(tokenizer)
        self._specials = re.compile("|".join(re.escape(text) for text in sorted(self.special, key=len)[::-1]))

    def render(self, messages: Sequence[Message], *, opening: bool, tools: Tools = (), template: str = "") -> str:
        """The text of a conversation; with `opening`, the opening of the next answer is added."""
        if self.text is None:
            return "".join(_plain_content(message) for message in messages)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in (messages if is_text(messages) else without_images(messages))],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=template or self.text,
                    add_generation_prompt=opening,
                    tokenize=False,
                    **self._options,
                )
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise RenderingError(f"the chat template cannot render {_roles(messages)}: {error}") from error

    def pieces(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, bool]]:
        """A conversation as (text, whether it is an answer); nothing is rendered after the last answer.

        The template's `{% generation %}` marks say what an answer is, if it has them. Otherwise an answer is what the
        template adds to the opening of that answer.
        """
        if self.text is not None and _GENERATION.search(self.text):
            return self._marked_pieces(messages, tools)
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
            text = self.render([asked, _calling(messages), *messages], opening=True, tools=tools)
        _, found, after = text.rpartition(_ANSWER)
        end = self._specials.search(after)
        if not found or end is None or not self._ends_answer(end.group(), after[: end.start()]):
            raise RenderingError(f"the chat template renders no end token between an answer and {_roles(messages)}")
        return after[end.end() :]

    @cached_property
    def end_or_none(self) -> int | None:
        """The special token that ends an answer in a rendered example; without a template, the end of a sequence."""
        if self.text is None:
            return None if self._tokenizer.eos_token_id is None else int(self._tokenizer.eos_token_id)
        example = [Message(role="user", content="question"), Message(role="assistant", content=_ANSWER)]
        _, found, after = self.render(example, opening=False).rpartition(_ANSWER)
        end = self._specials.match(after.lstrip()) if found and self.special else None
        return self.special[end.group()] if end else None

    @property
    def end(self) -> int:
        """The token that ends an answer. Raises RenderingError if there is none."""
        if self.end_or_none is None:
            raise RenderingError(
                "the chat template (or, without one, the tokenizer) ends an answer with no special token, so a model "
                "could not learn to stop; set chat_template to a template that renders one"
            )
        return self.end_or_none

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer: the template's end of a turn, and the tokenizer's end of a sequence."""
        return frozenset(end for end in (self.end_or_none, self._tokenizer.eos_token_id) if end is not None)

    def endless(self, first: str) -> str:
        """A template that renders the same, but stops before the end token of a finished conversation.

        `first` is the text of the tokenizer's first token, where it has one and no template.
        """
        ends = [self._tokenizer.convert_ids_to_tokens(end) for end in sorted(self.ends)]
        plain = f"{{{{ {first!r} }}}}{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}"
        whole = plain if self.text is None else self.text.removesuffix("\n")
        return _ENDLESS.replace("WHOLE", whole).replace("ENDS", repr(ends))

    def _grown_pieces(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, bool]]:
        """Pieces from renderings of the conversation as it grows.

        For each answer the template renders everything before it with the opening of an answer, and everything up to
        it. The second must begin with the first, and the rest of it is the answer.
        """
        pieces: list[tuple[str, bool]] = []
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
            pieces += [(between, False), (answer, True)]
            grown, previous = opened + answer, index
        return pieces

    def _marked_pieces(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, bool]]:
        """Pieces of the whole rendered conversation, cut at the template's generation marks."""
        assert self.text is not None
        marked = _END_GENERATION.sub(_MARKED[1], _GENERATION.sub(_MARKED[0], self.text))
        text = self.render(messages, opening=False, tools=tools, template=marked)
        pieces: list[tuple[str, bool]] = []
        before, *rest = text.split(_OPEN)
        for part in rest:
            answer, _, after = part.partition(_CLOSE)
            end = self._specials.match(after, len(after) - len(after.lstrip()))
            if end and self.special[end.group()] in self.ends:  # the marks leave out the end token: add it
                answer, after = answer + after[: end.end()], after[end.end() :]
            pieces += [(before, False), (answer, True)]
            before = after
        if not pieces:
            raise RenderingError("the chat template has generation marks, but marks nothing in these messages")
        return pieces

    def _cut_after_end(self, answer: str, index: int) -> str:
        """A rendered answer up to its last special token, without the line break that may follow."""
        if self.text is None:
            return answer
        ends = list(self._specials.finditer(answer))
        if not ends or answer[ends[-1].end() :].strip():
            raise RenderingError(f"message {index}: the chat template renders no end token after {answer[-60:]!r}")
        return answer[: ends[-1].end()]

    def _ends_answer(self, token: str, before: str) -> bool:
        """Return whether a special token that follows `before` ends an answer in the middle of a conversation.

        Some templates (gpt-oss) render a finished answer with another end token than the model generated. A token that
        begins a conversation begins a message, and ends none.
        """
        if self.special[token] == self.end:
            return True
        begins = self.render([Message(role="user", content="question")], opening=False).lstrip()
        return not before.strip() and not begins.startswith(token)


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


def _template_text(tokenizer: Any, chosen: str) -> str | None:
    """The template to use: the chosen text or file, else the tokenizer's own (its 'default' if it has several)."""
    if chosen and ("{%" in chosen or "{{" in chosen):
        return chosen
    if chosen:
        if not Path(chosen).is_file():
            raise RenderingError(f"chat_template: no file {chosen} (a template itself would contain '{{%' or '{{{{')")
        return Path(chosen).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.get_chat_template())
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


def added_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of texts with two characters or more that a tokenizer takes for tokens of its own anywhere."""
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


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
