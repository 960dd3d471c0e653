"""Tokens that end an answer: from the template, the tokenizer and the model's generation config.

Qwen, Llama, Mistral   one token after every answer
gpt-oss                <|return|> after an answer, <|call|> after a call of a tool; between messages it has <|end|>
GLM                    none: an answer ends with the token that begins the next message, <|user|> or <|observation|>
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from hone.data.messages import RenderingError, Tools
from hone.data.templates.forms import EXAMPLE_TOOLS, QUESTION, Rendering, calling
from hone.types import Message

GENERATION_ENDS = "generation_ends"  # attribute of a tokenizer: the ends of its model's generation config
ANSWER = "answer-7f3d9c"  # stands for an answer in a rendered example; no template has a reason to touch it
_RESULTS = [Message(role="tool", content="result", name="tool", tool_call_id=f"call0000{n}") for n in (0, 1)]

_ENDLESS = (  # what a template renders, without the last end token if only white space follows it
    "{% set hone_whole %}WHOLE{% endset %}{% set hone = namespace(said=hone_whole) %}"
    "{% if not add_generation_prompt %}{% for end in ENDS %}{% set cut = hone_whole.rsplit(end, 1) %}"
    "{% if cut | length == 2 and not cut[1].strip() %}{% set hone.said = cut[0] %}{% endif %}"
    "{% endfor %}{% endif %}{{ hone.said }}"
)


class Ends:
    """The ends of answers of one template, found by rendering examples.

    A tokenizer may have the end-of-sequence ids of its model's generation config as `generation_ends`.
    """

    def __init__(self, template: Rendering, tokenizer: Any) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._generation = getattr(tokenizer, GENERATION_ENDS, ())
        self._found: dict[bool, int | None] = {}  # by whether there are tools

    def after_answer(self, tools: Tools = ()) -> int | None:
        """The token that ends an answer; without a template, the end of a sequence. None: there is none."""
        if self._template.text is None:
            return None if self._tokenizer.eos_token_id is None else int(self._tokenizer.eos_token_id)
        if bool(tools) not in self._found:
            end = self._first(self._after([_answered()], tools))
            self._found[bool(tools)] = end if end is not None else self._of_next(tools)
        return self._found[bool(tools)]

    @cached_property
    def all(self) -> frozenset[int]:
        """Every token that ends an answer."""
        found = {self.after_answer(), self._tokenizer.eos_token_id, *self._generation}
        if self._template.text is not None:
            with suppress(RenderingError):  # a template of other conversations only
                found |= {self.after_answer(EXAMPLE_TOOLS), self.after_call}
        return frozenset(end for end in found if end is not None)

    @property
    def after_call(self) -> int | None:
        """The token that ends an answer that calls a tool; None if the template shows none.

        What ends each of several calls, such as `</tool_call>`, ends no answer.
        """
        return self._calls[0]

    def is_of_call(self, token: str) -> bool:
        """Return whether a special token belongs to a single call, and so ends no answer."""
        return token in self._calls[1]

    @cached_property
    def _calls(self) -> tuple[int | None, frozenset[str]]:
        """The token that ends an answer with calls, and the special tokens between two calls."""
        results = _RESULTS if self.begin_next else []
        for count in (2, 1):  # some templates take one call only
            with suppress(RenderingError):
                text = self._rendered([calling(_RESULTS[:count], ANSWER), *results[:count]], EXAMPLE_TOOLS)
                if text.count(ANSWER) < count:
                    continue
                _, *between, after = text.split(ANSWER)
                after = after.partition("result")[0]
                inside = frozenset(self._specials("".join(between)))
                found = [token for token in self._specials(after) if token not in inside]
                if not found or (not self.begin_next and not after.rstrip().endswith(found[-1])):
                    return None, inside
                return self._template.special[found[-1]], inside
        return None, frozenset()

    @cached_property
    def call_end(self) -> str:
        """The text of `after_call`, where that is another token than after other answers; else ""."""
        end = self.after_call
        return self._text_of(end) if end not in (None, self.after_answer(EXAMPLE_TOOLS)) else ""

    @cached_property
    def begin_next(self) -> bool:
        """True if answers end with the token that begins the next message."""
        if self._template.text is None:
            return False
        return self._first(self._after([_answered()], ())) is None and self.after_answer() is not None

    @cached_property
    def _in_the_middle(self) -> str:
        """The special token between an answer and the next question, "" for none."""
        with suppress(RenderingError):
            found = self._template.specials.match(self._after([_answered(), QUESTION], ()).lstrip())
            return found.group() if found and self._template.special else ""
        return ""

    def of(self, message: Message) -> str:
        """The text of the token that ends an answer, with calls or without; "" for none."""
        call = self.after_call if message.get("tool_calls") else None
        return self._text_of(call if call is not None else self.after_answer())

    def as_learnt(self, answer: str) -> str:
        """A rendered answer with the end that a model generates, where the template has another between messages."""
        middle, end = self._in_the_middle, self._text_of(self.after_answer())
        if middle and end and self._template.special[middle] not in self.all and answer.rstrip().endswith(middle):
            return answer.rstrip().removesuffix(middle) + end
        return answer

    def endless(self, first: str) -> str:
        """A template that renders the same, but stops before the end token of a finished conversation.

        `first` is the text of the tokenizer's first token, where it has one and no template.
        """
        ends = [self._tokenizer.convert_ids_to_tokens(end) for end in sorted(self.all)]
        plain = f"{{{{ {first!r} }}}}{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}"
        text = self._template.text
        return _ENDLESS.replace("WHOLE", plain if text is None else text.removesuffix("\n")).replace("ENDS", repr(ends))

    def _of_next(self, tools: Tools) -> int | None:
        """The token that begins the next question, where the template renders nothing else after an answer."""
        with suppress(RenderingError):
            after, question = self._after([_answered(), QUESTION], tools), self._rendered([], tools)
            end = self._first(after)
            text = self._text_of(end)
            if text and text != self._tokenizer.bos_token and text in question:
                return end
        return None

    def _text_of(self, end: int | None) -> str:
        return next((text for text, number in self._template.special.items() if number == end), "")

    def _first(self, after: str) -> int | None:
        """The special token with which a text begins."""
        found = self._template.specials.match(after.lstrip()) if self._template.special else None
        return self._template.special[found.group()] if found else None

    def _after(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text after the answer in a rendered example."""
        _, found, after = self._rendered(messages, tools).rpartition(ANSWER)
        return after if found else ""

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> str:
        return self._template.render([QUESTION, *messages], opening=False, tools=tools)

    def _specials(self, text: str) -> list[str]:
        return [found.group() for found in self._template.specials.finditer(text) if self._template.special]


def _answered() -> Message:
    return Message(role="assistant", content=ANSWER)


def without_opening(template: Rendering, before: str, answer: str) -> tuple[str, str]:
    """A marked answer without the opening that a rollout gives to the model, which moves to the text before it."""
    opening = template.opening
    if not opening or before.endswith(opening):
        return before, answer
    ends = [len(opening), *(found.end() for found in template.specials.finditer(opening) if template.special)]
    moved = 0
    for start in range(len(opening)):  # the marks may begin anywhere in the opening, and the answer lack its end
        if before.endswith(opening[:start]):
            moved = max(moved, *(end - start for end in ends if answer.startswith(opening[start:end])), 0)
    return before + answer[:moved], answer[moved:]


__all__ = ["ANSWER", "Ends", "without_opening"]
