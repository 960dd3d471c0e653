"""`ChatTemplate`: messages to text by a model's chat template.

`hone.data.templates` holds what is found out before the first step: the form of messages, the control tokens, and where
answers begin and end in a conversation to learn from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import jinja2

from hone.data.images import without_images
from hone.data.messages import RenderingError, Tools
from hone.data.templates.forms import (
    EXAMPLE_TOOLS,
    QUESTION,
    THOUGHT,
    TemplateForm,
    Unrendered,
    calling,
    special_tokens,
    template_texts,
)
from hone.data.templates.guard import ESCAPED_GUARD, GUARD
from hone.data.templates.pieces import conversation_pieces
from hone.types import Message

_ANSWER = "answer-7f3d9c"  # stands for an answer in a rendered example; no template has a reason to touch it
_ENDLESS = (  # what a template renders, without the last end token if only white space follows it
    "{% set hone_whole %}WHOLE{% endset %}{% set hone = namespace(said=hone_whole) %}"
    "{% if not add_generation_prompt %}{% for end in ENDS %}{% set cut = hone_whole.rsplit(end, 1) %}"
    "{% if cut | length == 2 and not cut[1].strip() %}{% set hone.said = cut[0] %}{% endif %}"
    "{% endfor %}{% endif %}{{ hone.said }}"
)


class ChatTemplate:
    """The chat template of one tokenizer; without one, the contents of the messages are joined as they are."""

    def __init__(
        self, tokenizer: Any, chosen: str, options: Mapping[str, Any], unrendered: Unrendered = "error"
    ) -> None:
        """`chosen` is Jinja2 text or a file of it, empty: the tokenizer's own; `options` are variables for it.

        Raises RenderingError if there is no such file, or if options are given to a tokenizer without a template.
        """
        self.text, self.text_with_tools = template_texts(tokenizer, chosen)
        self._forms = {bool(some): TemplateForm(self._example(some), unrendered) for some in ((), EXAMPLE_TOOLS)}
        self._ends: dict[bool, int | None] = {}  # by whether there are tools
        self._tokenizer = tokenizer
        self._options = dict(options)
        if self.text is None and options:
            raise RenderingError(f"data.chat.options {sorted(options)} are set, but the tokenizer has no chat template")
        self.special = special_tokens(tokenizer)
        self.specials = re.compile("|".join(re.escape(text) for text in sorted(self.special, key=len)[::-1]))

    def render(self, messages: Sequence[Message], *, opening: bool, tools: Tools = (), template: str = "") -> str:
        """The text of a conversation; with `opening`, the opening of the next answer is added.

        Raises RenderingError for messages that the template refuses, or of which it would leave something out.
        """
        form, plain = self._forms[bool(tools)], all(map(is_plain, messages))
        if self.text is None:
            if not plain:
                form.check_plain(messages)
            return "".join(_plain_content(message) for message in messages)
        if not is_text(messages):
            messages = without_images(messages)
        if not plain or form.takes_parts_only:
            messages = form.fitted(messages)
        return self._rendered(messages, opening, tools, template)

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
        return str(text).replace(ESCAPED_GUARD, GUARD)

    def _text(self, tools: Tools) -> str | None:
        return self.text_with_tools if tools else self.text

    def _example(self, tools: Tools) -> Callable[[Sequence[Message]], str | None]:
        """Rendering of examples, which the template may refuse."""

        def render(messages: Sequence[Message]) -> str | None:
            with suppress(RenderingError):
                return self._rendered(messages, False, tools)
            return None

        return render

    def pieces(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, int | None]]:
        """A conversation as (text, number of the message whose answer it is, None: no answer).

        Nothing is rendered after the last answer. The template's `{% generation %}` marks say what an answer is, if it
        has them. Otherwise an answer is what the template adds to the opening of that answer.
        """
        return conversation_pieces(self, self._text(tools), messages, tools)

    def continuation(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text between an answer's end token and the next answer.

        It is found by rendering an example with a placeholder for the answer, so the generated text is not needed.
        """
        if self.text is None:
            return self.render(messages, opening=True)
        try:
            answer = Message(role="assistant", content=_ANSWER)
            text = self.render([QUESTION, answer, *messages], opening=True, tools=tools)
        except RenderingError:  # some templates take a tool's message after a call of that tool only
            if not any(message.get("role") == "tool" for message in messages):
                raise
            form = self._forms[bool(tools)]
            called = [form.shown(one)[0] for one in (QUESTION, calling(messages, _ANSWER), *messages)]
            text = self._rendered(called, True, tools)
        _, found, after = text.rpartition(_ANSWER)
        end = self.specials.search(after)
        if not found or end is None or not self._ends_answer(end.group(), after[: end.start()], tools):
            raise RenderingError(f"the chat template renders no end token between an answer and {_roles(messages)}")
        return after[end.end() :]

    def end_or_none(self, tools: Tools = ()) -> int | None:
        """The special token that ends an answer in a rendered example; without a template, the end of a sequence."""
        if self.text is None:
            return None if self._tokenizer.eos_token_id is None else int(self._tokenizer.eos_token_id)
        if bool(tools) not in self._ends:
            example = [QUESTION, Message(role="assistant", content=_ANSWER)]
            _, found, after = self.render(example, opening=False, tools=tools).rpartition(_ANSWER)
            end = self.specials.match(after.lstrip()) if found and self.special else None
            self._ends[bool(tools)] = self.special[end.group()] if end else None
        return self._ends[bool(tools)]

    def end_with(self, tools: Tools = ()) -> int:
        """The token that ends an answer. Raises RenderingError if there is none."""
        end = self.end_or_none(tools)
        if end is None:
            raise RenderingError(
                "the chat template (or, without one, the tokenizer) ends an answer with no special token, so a model "
                "could not learn to stop; set data.chat_template to one that renders it"
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
            found.add(self.end_or_none(EXAMPLE_TOOLS))
        return frozenset(end for end in found if end is not None)

    @cached_property
    def opened_thought(self) -> str:
        """The mark of a thought with which the template begins every answer, "" for none.

        The policy writes the rest, so its own tokens hold the end of the thought without its beginning.
        """
        if self.text is None:
            return ""
        opening = self.render([QUESTION], opening=True).rpartition(QUESTION["content"])[2]
        *_, last = (None, *THOUGHT.finditer(opening))
        return opening[last.start() :] if last and not last["end"] else ""

    def endless(self, first: str) -> str:
        """A template that renders the same, but stops before the end token of a finished conversation.

        `first` is the text of the tokenizer's first token, where it has one and no template.
        """
        ends = [self._tokenizer.convert_ids_to_tokens(end) for end in sorted(self.ends)]
        plain = f"{{{{ {first!r} }}}}{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}"
        whole = plain if self.text is None else self.text.removesuffix("\n")
        return _ENDLESS.replace("WHOLE", whole).replace("ENDS", repr(ends))

    def _ends_answer(self, token: str, before: str, tools: Tools) -> bool:
        """Return whether a special token that follows `before` ends an answer in the middle of a conversation.

        Some templates (gpt-oss) render a finished answer with another end token than the model generated. A token that
        begins a conversation begins a message, and ends none.
        """
        if self.special[token] == self.end_with(tools):
            return True
        begins = self.render([QUESTION], opening=False).lstrip()
        return not before.strip() and not begins.startswith(token)


def encodable(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone, which no tokenizer takes.

    JSON may contain one (`"\\ud83d"`), and so may the name of a file in Python.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_text(messages: Sequence[Message]) -> bool:
    """Return whether no message has parts, such as images."""
    return all(isinstance(message.get("content"), str | None) for message in messages)


def is_plain(message: Message) -> bool:
    """Return whether a message is text of a role that templates have, as almost all are."""
    plain = message.keys() == {"role", "content"} and isinstance(message["content"], str)
    return plain and message["role"] in ("system", "user", "assistant", "tool")


def _plain_content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RenderingError(f"without a chat template a message's content should be text, found {content!r:.60}")
    return content


def _roles(messages: Sequence[Message]) -> str:
    return "the roles " + ", ".join(str(message.get("role")) for message in messages)
