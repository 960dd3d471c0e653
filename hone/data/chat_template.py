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
from hone.data.templates.ends import ANSWER, Ends
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
        self._tokenizer = tokenizer
        self._options = dict(options)
        if self.text is None and options:
            raise RenderingError(f"data.chat.options {sorted(options)} are set, but the tokenizer has no chat template")
        self.special = special_tokens(tokenizer)
        self.specials = re.compile("|".join(re.escape(text) for text in sorted(self.special, key=len)[::-1]))
        self.ending = Ends(self, tokenizer)

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
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
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

    def hides_thoughts(self, tools: Tools) -> bool:
        """Return whether the template opens a thought for each answer, and shows no `reasoning_content`."""
        return bool(self.opened_thought) and self._forms[bool(tools)].hides_thoughts

    def continuation(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text between an answer's end token and the next answer."""
        return self.following(messages, tools)[1]

    def following(self, messages: Sequence[Message], tools: Tools) -> tuple[int | None, str]:
        """The special token that the template renders after an answer (None: no template), and the text after it.

        It is found by rendering an example with a placeholder for the answer, so the generated text is not needed.
        """
        if self.text is None:
            return None, self.render(messages, opening=True)
        calls = any(message.get("role") == "tool" for message in messages)
        if calls and self.ending.call_end:  # another one than an answer's
            after = self._called(messages, tools).rpartition(ANSWER)[2].partition(self.ending.call_end)[2]
            return self.ending.after_call, after
        try:
            answer = Message(role="assistant", content=ANSWER)
            text = self.render([QUESTION, answer, *messages], opening=True, tools=tools)
        except RenderingError:  # some templates take a tool's message after a call of that tool only
            if not calls:
                raise
            text = self._called(messages, tools)
        _, found, after = text.rpartition(ANSWER)
        end = self.specials.search(after)
        if not found or end is None or not self._ends_answer(end.group(), after[: end.start()], tools):
            raise RenderingError(f"the chat template renders no end token between an answer and {_roles(messages)}")
        return self.special[end.group()], after[end.end() :]

    def _called(self, messages: Sequence[Message], tools: Tools) -> str:
        """A rendered example of results after calls, whose arguments are `ANSWER`."""
        form = self._forms[bool(tools)]
        return self._rendered(
            [form.shown(one)[0] for one in (QUESTION, calling(messages, ANSWER), *messages)], True, tools
        )

    def end_with(self, tools: Tools = ()) -> int:
        """The token that ends an answer. Raises RenderingError if there is none."""
        end = self.ending.after_answer(tools)
        if end is None:
            raise RenderingError(
                "the chat template (or, without one, the tokenizer) ends an answer with no special token, so a model "
                "could not learn to stop; set data.chat_template to one that renders it"
            )
        return end

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.ending.all

    @cached_property
    def opening(self) -> str:
        """The text that the template adds after a question for the next answer, "" if that cannot be told."""
        asked, opened = (self.render([QUESTION], opening=opening) for opening in (False, True))
        found = opened.removeprefix(asked)
        return "" if found == opened else found

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
    """Return whether a message is text of a role that every template has, as almost all are."""
    plain = message.keys() == {"role", "content"} and isinstance(message["content"], str)
    return plain and message["role"] in ("user", "assistant")


def _plain_content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RenderingError(f"without a chat template a message's content should be text, found {content!r:.60}")
    return content


def _roles(messages: Sequence[Message]) -> str:
    return "the roles " + ", ".join(str(message.get("role")) for message in messages)
