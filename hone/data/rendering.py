"""Rendering: the chat template turns messages into tokens, and generated tokens are never encoded again.

    render_prompt(messages)                         [system][user][opening of an answer]
    render_continuation(ids so far, new messages)   ...generated tokens[end] + [tool or user][opening of an answer]
    render_sample(messages)                         a whole conversation; the loss is on the answers and their [end]

Text is tokenised in pieces that meet where generation starts and ends, as in a rollout, so no token contains both the
end of an opening and the first word of an answer. A supervised sample therefore has exactly the token ids that a
rollout would have if the model gave these answers.

A text that is not the template's may contain what looks like a special token ("<|im_end|>"): a row of a file, what an
environment or a tool sends, a name that the policy invents. It is encoded as ordinary text (`Guard`), so nothing but
the template and the policy's own tokens can end a turn or begin one.

Some templates rewrite earlier turns (Qwen3 removes the thoughts of earlier answers after a new question). Token ids
here are append-only: a conversation of several turns keeps each answer as it was given.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.data.chat_template import ChatTemplate, encodable, is_plain, is_text
from hone.data.images import (
    ImageError,
    ImageReader,
    encoded,
    images_in,
    is_image,
    parts_of,
    source_of,
    with_sources,
)
from hone.data.messages import RenderingError, Tools, normal_message, normal_messages
from hone.data.templates.forms import Unrendered, marks_only_the_first_word
from hone.data.templates.guard import GUARD, Guard
from hone.types import Image, Message

_LONGEST_TOKEN = 32  # characters


class Renderer:
    """Messages to token ids and back, for one tokenizer.

    Without a chat template, the contents of the messages follow each other with nothing between them, after the
    tokenizer's own first token (if it has one). An answer ends with the tokenizer's end-of-sequence token.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str = "",
        chat_options: Mapping[str, Any] | None = None,
        image_reader: ImageReader | None = None,
        *,
        unrendered: Unrendered = "error",
        special_tokens_in_rows: bool = False,
        special_tokens_in_answers: bool = True,
    ) -> None:
        """`tokenizer` is a transformers tokenizer; `chat_template` is Jinja2 text or a file of it, empty: its own.

        Without an `image_reader`, messages with images are refused. With `special_tokens_in_rows`, prompts and samples
        may contain special tokens, such as prompts that are rendered already. Without `special_tokens_in_answers`,
        `answer` has none.

        Raises RenderingError if there is no such file, or if chat options are given to a tokenizer without a template.
        """
        self.tokenizer = tokenizer
        self._images = image_reader
        self._template = ChatTemplate(tokenizer, chat_template, chat_options or {}, unrendered)
        self._own_template = not chat_template
        self._guard = Guard(self._template, tokenizer)
        self.guards_rows = not special_tokens_in_rows
        self._keeps_special = special_tokens_in_answers
        self._first = [] if self._template.text is not None else _first_ids(tokenizer)
        marks = marks_only_the_first_word(tokenizer) and self._template.special
        self._before = next(iter(self._template.special)) if marks else ""

    # ------------------------------------------------------------------------------------------------- the verbs

    def with_images(self, messages: Sequence[Message], folder: Path = Path()) -> tuple[Message, ...]:
        """Read every image of the messages: `image` of each image part becomes an `Image`, as the other verbs expect.

        Paths are relative to `folder`. Raises RenderingError naming an image that is missing or broken, or if the
        model takes no images.
        """
        if is_text(messages) or not any(is_image(part) for part in parts_of(messages)):
            return tuple(messages)
        return with_sources(messages, lambda part: {"image": self._read(part, folder)})

    def _read(self, part: Mapping[str, Any], folder: Path) -> Image:
        if self._images is None:
            raise RenderingError("the messages contain an image, but this model takes text only")
        source = source_of(part)
        try:
            return source if isinstance(source, Image) else self._images.image(encoded(source, folder))
        except (ImageError, ValueError) as error:
            named = isinstance(error, ImageError) or not isinstance(source, str | Path)
            raise RenderingError(str(error) if named else f"image {source!s:.200}: {error}") from error

    def render_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The ids of a conversation that the model is to answer, with the opening of the answer."""
        if not messages:
            raise RenderingError("there are no messages to render")
        if messages[-1].get("role") == "assistant":
            raise RenderingError("the last message is the assistant's: there is nothing to answer")
        shown = self._shown(messages)
        text = self._template.render(shown, opening=True, tools=self._offered(tools))
        return tuple(Expansion(self._images, shown).all_of(self._first + self._encode(text)))

    def render_finished(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The ids of a finished conversation, with everything that the template adds after its last message."""
        text = self._template.render(self._shown(messages), opening=False, tools=self._offered(tools))
        ids = tuple(self._first + self._encode(text))
        return ids if self._template.text is not None else (*ids, self._template.end_with())

    def render_continuation(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Tools = ()
    ) -> tuple[int, ...]:
        """The ids to append to `ids`, which end with a generated answer: the new messages and the next opening.

        `ids` are never changed or encoded again. If the answer was cut off before its end token, the end token comes
        first.
        """
        if not ids:
            raise RenderingError("a continuation needs the ids of a prompt and an answer before it")
        if not messages:
            raise RenderingError("there are no messages to continue with")
        if any(is_image(part) for part in parts_of(messages)):
            raise RenderingError("a message after the first answer contains an image; images can be in the prompt only")
        guarded = [self._guard.message(normal_message(one, lenient=True), strict=True) for one in messages]
        end, text = self._template.following(guarded, self._offered(tools))
        after = self._encode(text, later=True)
        if ids[-1] == end or (ids[-1] in self.end_token_ids and not self._template.ending.begin_next):
            return tuple(after)
        return (end if end is not None and self._template.ending.begin_next else self._template.end_with(tools), *after)

    def render_sample(
        self, messages: Sequence[Message], tools: Tools = (), first: int = 0
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, loss mask) of a conversation: the mask is 1 on every answer of the assistant and its end token.

        Answers before message `first`, and those with `trainable: false`, belong to the prompt. Nothing is rendered
        after the last answer. `ChatTemplate.pieces` says what an answer is.

        Raises RenderingError if no answer is learnt, or if the template does not render an answer after its opening.
        """
        if not any(message.get("role") == "assistant" for message in messages):
            raise RenderingError("the messages have no answer of the assistant to learn from")
        end = self._template.end_with(tools)
        ids, mask = list(self._first), [0] * len(self._first)
        expansion = Expansion(self._images, messages)
        started = False
        for text, answer in self._template.pieces(self._shown(messages), self._offered(tools)):
            learnt = answer is not None and answer >= first and messages[answer].get("trainable", True)
            piece = expansion.next_of(self._encode(text, later=started), answer is not None)
            started = started or bool(text)
            ids += piece
            mask += [int(learnt)] * len(piece)
            if answer is not None and self._template.text is None:
                ids.append(end)
                mask.append(int(learnt))
        expansion.end()
        if mask:
            mask[0] = 0  # a first token has no log-prob
        if not any(mask):
            raise RenderingError(
                "no answer of these messages is learnt: each is excluded (weight: 0, trainable: false ...), or is left "
                "out by the {% generation %} marks of the chat template"
            )
        return tuple(ids), tuple(mask)

    def render_steps(
        self, messages: Sequence[Message], steps: Sequence[str], separator: str, tools: Tools = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, mask) of an answer in steps: the mask is 1 on the token that follows each step.

        That is the separator's first token, and after the last step the end token. Steps and separators are tokenised
        separately, so that no token belongs to two of them.
        """
        ids, marks = list(self.render_prompt(messages, tools)), []
        for number, step in enumerate(steps):
            if number and separator:
                ids += self._encode(separator, later=True)
            ids += self._encode(self._guard.said(step) if self.guards_rows else step, later=True)
            marks.append(len(ids))
        ids.append(self._template.end_with(tools))
        return tuple(ids), tuple(int(position in marks) for position in range(len(ids)))

    def renders_tools(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether the chat template shows these tools to the model at all."""
        asked = self._shown([message for message in messages if message.get("role") != "assistant"])
        plain, shown = (self._template.render(asked, opening=False, tools=some) for some in ((), tools))
        return plain != shown

    def shorten(self, text: str, max_tokens: int) -> str:
        """The beginning of a text, with a note of what was left out, if it has more tokens than `max_tokens`."""
        text = text.replace(GUARD, "")
        head = self._guard.told(text[: max_tokens * _LONGEST_TOKEN])  # a text of 10 MB is not encoded whole
        if len(text) <= max_tokens * _LONGEST_TOKEN and len(self._encode(head, later=True)) <= max_tokens:
            return text
        note = f"\n[cut: {len(text)} characters in all]"
        room = max_tokens - len(self._encode(note, later=True))
        if room < max_tokens // 2:
            note, room = "", max_tokens
        kept = self.decode(self._encode(head, later=True)[:room])
        while kept and len(self._encode(self._guard.told(kept), later=True)) > room:  # a decoded text may have more
            kept = kept[: len(kept) - 1 - len(kept) // 20]
        return kept + note

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of generated ids, without special tokens unless `keep_special` is set."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False)
        )

    def save_template(self, folder: Path) -> None:
        """Save the chat template with the tokenizer in `folder`, if it is not the tokenizer's own."""
        if self._template.text is None or self._own_template or self._template.text == self.tokenizer.chat_template:
            return  # the tokenizer's own templates, of which it may have several, are saved with it
        self._save(folder, self._template.text)

    def save_endless_template(self, folder: Path) -> None:
        """Save a template with the tokenizer in `folder` that stops before the end token of a finished conversation.

        A sequence classifier is read at the last token, hone's value models before the end token.
        """
        self._save(folder, self._template.ending.endless(self.tokenizer.bos_token if self._first else ""))

    def _save(self, folder: Path, template: str) -> None:
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)

    @property
    def template(self) -> str:
        """The text of the chat template for conversations with tools; empty without one."""
        return self._template.text_with_tools or ""

    @property
    def opened_thought(self) -> str:
        """See `ChatTemplate.opened_thought`."""
        return self._template.opened_thought

    def answer(self, ids: Sequence[int]) -> str:
        """The text of a sampled answer without the token that ended it, with the mark of a thought opened for it.

        Other special tokens are kept unless `special_tokens_in_answers` is off: some tokenizers have tags such as
        `<think>` as special tokens.
        """
        own = list(ids)
        while own and own[-1] in self.end_token_ids:
            own.pop()
        return self.opened_thought + self.decode(own, keep_special=self._keeps_special)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the template's, the tokenizer's end of a sequence, the generation config's."""
        return self._template.ends

    # ---------------------------------------------------------------------------------------------------- tokens

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in hone's form, guarded unless rows may contain special tokens."""
        normal = messages if all(map(is_plain, messages)) else normal_messages(messages, lenient=True)
        return [self._guarded(message) for message in normal]

    def _offered(self, tools: Tools) -> Tools:
        """The tools with no control token in their names and descriptions, which servers write."""
        return self._guard.tools(tools) if tools else tools

    def _guarded(self, message: Message) -> Message:
        if not self.guards_rows or (is_plain(message) and not self._guard.anything.search(message["content"])):
            return message
        return self._guard.message(message)

    def _encode(self, text: str, later: bool = False) -> list[int]:
        """The ids of a piece; one that is `later` than others gets no mark of a first word.

        The two sides of a guard are encoded apart, so no token contains both.
        """
        if GUARD in text:
            first, *rest = text.split(GUARD)
            return self._encode(first, later) + [one for part in rest for one in self._encode(part, later=True)]
        if not text:
            return []
        before = self._before if later else ""
        ids = list(self.tokenizer(before + encodable(text), add_special_tokens=False, verbose=False)["input_ids"])
        return ids[1:] if before else ids


def _first_ids(tokenizer: Any) -> list[int]:
    """The tokenizer's own first token, which a template would render."""
    first = list(tokenizer("", verbose=False)["input_ids"])
    return first[:1] if first and first[0] == tokenizer.bos_token_id else []


class Expansion:
    """Repeats each image's placeholder once per token of the image, piece by piece of a conversation."""

    def __init__(self, reader: ImageReader | None, messages: Sequence[Message]) -> None:
        """Raises RenderingError for an image that was not read (`Renderer.with_images`)."""
        self._token_id = reader.token_id if reader is not None else None
        self._images = () if is_text(messages) else images_in(messages)
        self._placed = 0
        if not is_text(messages) and len(self._images) != sum(is_image(part) for part in parts_of(messages)):
            raise RenderingError("the messages show an image that was not read; a model of text only takes none")

    def all_of(self, ids: Sequence[int]) -> list[int]:
        """A whole conversation's ids."""
        whole = self.next_of(ids)
        self.end()
        return whole

    def next_of(self, ids: Sequence[int], learnt: bool = False) -> list[int]:
        """The ids of the next piece. Raises RenderingError for a placeholder without image or in an answer to learn."""
        if self._token_id is None:
            return list(ids)
        expanded: list[int] = []
        for token in ids:
            if token != self._token_id:
                expanded.append(token)
                continue
            if learnt or self._placed == len(self._images):
                what = "an answer to learn" if learnt else f"more than the {len(self._images)} images of the messages"
                raise RenderingError(f"the image placeholder (token {token}) stands in {what}")
            expanded += [token] * self._images[self._placed].tokens
            self._placed += 1
        return expanded

    def end(self) -> None:
        """Raises RenderingError if an image was given no place."""
        if self._placed != len(self._images):
            raise RenderingError(
                f"the chat template renders {self._placed} of the {len(self._images)} images; give a template of the "
                "model's own processor as data.chat_template"
            )
