"""Rendering: the chat template turns messages into tokens, and generated tokens are never encoded again.

    render_prompt(messages)                         [system][user][opening of an answer]
    render_continuation(ids so far, new messages)   ...generated tokens[end] + [tool or user][opening of an answer]
    render_sample(messages)                         a whole conversation; the loss is on the answers and their [end]

Text is tokenised in pieces that meet where generation starts and ends, as in a rollout, so no token contains both the
end of an opening and the first word of an answer. A supervised sample therefore has exactly the token ids that a
rollout would have if the model gave these answers.

A text that an environment sends may contain what looks like a special token ("<|im_end|>"). It is encoded as ordinary
text, so nothing that a tool returns can end a turn or begin one.

Some templates rewrite earlier turns (Qwen3 removes the thoughts of earlier answers after a new question). Token ids
here are append-only: a conversation of several turns keeps each answer as it was given.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.data.chat_template import (
    ChatTemplate,
    RenderingError,
    Tools,
    added_tokens,
    encodable,
    is_text,
    marks_only_the_first_word,
)
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
from hone.types import Image, Message

GUARD = "\ue0f2"  # a private-use character that stands within text that must not become a special token
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
    ) -> None:
        """`tokenizer` is a transformers tokenizer; `chat_template` is Jinja2 text or a file of it, empty: its own.

        Without an `image_reader`, messages with images are refused.

        Raises RenderingError if there is no such file, or if chat options are given to a tokenizer without a template.
        """
        self.tokenizer = tokenizer
        self._images = image_reader
        self._template = ChatTemplate(tokenizer, chat_template, chat_options or {})
        self._first = self._first_ids()
        marks = marks_only_the_first_word(tokenizer) and self._template.special
        self._before = next(iter(self._template.special)) if marks else ""
        self._added = added_tokens(tokenizer)

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
        guarded = [self._guarded(one) if one.get("role") == "tool" else one for one in messages]
        ids = self._first + self._encode(self._template.render(guarded, opening=True, tools=tools))
        return tuple(Expansion(self._images, messages).all_of(ids))

    def render_finished(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The ids of a finished conversation, with everything that the template adds after its last message."""
        ids = tuple(self._first + self._encode(self._template.render(messages, opening=False, tools=tools)))
        return ids if self._template.text is not None else (*ids, self._template.end)

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
        guarded = [self._guarded(one) for one in messages]
        after = self._encode(self._template.continuation(guarded, tools), later=True)
        return tuple(after if ids[-1] in self.end_token_ids else [self._template.end, *after])

    def render_sample(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, loss mask) of a conversation: the mask is 1 on every answer of the assistant and its end token.

        Nothing is rendered after the last answer. `ChatTemplate.pieces` says what an answer is.

        Raises RenderingError if there is no answer, or if the template does not render an answer after its opening.
        """
        if not any(message.get("role") == "assistant" for message in messages):
            raise RenderingError("the messages have no answer of the assistant to learn from")
        end = self._template.end
        ids, mask = list(self._first), [0] * len(self._first)
        expansion = Expansion(self._images, messages)
        started = False
        for text, learnt in self._template.pieces(messages, tools):
            piece = expansion.next_of(self._encode(text, later=started), learnt)
            started = started or bool(text)
            ids += piece
            mask += [int(learnt)] * len(piece)
            if learnt and self._template.text is None:
                ids.append(end)
                mask.append(1)
        expansion.end()
        if mask:
            mask[0] = 0  # a first token has no log-prob
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
            ids += self._encode(step, later=True)
            marks.append(len(ids))
        ids.append(self._template.end)
        return tuple(ids), tuple(int(position in marks) for position in range(len(ids)))

    def renders_tools(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether the chat template shows these tools to the model at all."""
        asked = [message for message in messages if message.get("role") != "assistant"]
        plain, shown = (self._template.render(asked, opening=False, tools=some) for some in ((), tools))
        return plain != shown

    def shorten(self, text: str, max_tokens: int) -> str:
        """The beginning of a text, with a note of what was left out, if it has more tokens than `max_tokens`."""
        head = text[: max_tokens * _LONGEST_TOKEN]  # a text of 10 MB is not encoded whole
        if len(head) == len(text) and len(self._encode(text, later=True)) <= max_tokens:
            return text
        note = f"\n[cut: {len(text)} characters in all]"
        room = max_tokens - len(self._encode(note, later=True))
        if room < max_tokens // 2:
            note, room = "", max_tokens
        kept = self.decode(self._encode(head, later=True)[:room])
        while kept and len(self._encode(kept, later=True)) > room:  # a decoded text may encode to a few tokens more
            kept = kept[: len(kept) - 1 - len(kept) // 20]
        return kept + note

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of generated ids, without special tokens unless `keep_special` is set."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False)
        )

    def save_template(self, folder: Path) -> None:
        """Save the chat template with the tokenizer in `folder`, if it is not the tokenizer's own."""
        if self._template.text is None or self._template.text == self.tokenizer.chat_template:
            return
        self._save(folder, self._template.text)

    def save_endless_template(self, folder: Path) -> None:
        """Save a template with the tokenizer in `folder` that stops before the end token of a finished conversation.

        A sequence classifier is read at the last token, hone's value models before the end token.
        """
        self._save(folder, self._template.endless(self.tokenizer.bos_token if self._first else ""))

    def _save(self, folder: Path, template: str) -> None:
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)

    @property
    def template(self) -> str:
        """The chat template's text; empty without one."""
        return self._template.text or ""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the template's end of a turn, and the tokenizer's end of a sequence."""
        return self._template.ends

    # ---------------------------------------------------------------------------------------------------- tokens

    def _guarded(self, message: Message) -> Message:
        """The message with a mark in everything that looks like a token of the tokenizer's own; see `_encode`."""
        content = message.get("content")
        if not isinstance(content, str):
            return message
        content = content.replace(GUARD, "")
        if self._added is not None:
            content = self._added.sub(lambda found: found[0][0] + GUARD + found[0][1:], content)
        return Message(**{**message, "content": content})

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

    def _first_ids(self) -> list[int]:
        """The tokenizer's own first token; none with a template, because a template renders it."""
        if self._template.text is not None:
            return []
        first = list(self.tokenizer("", verbose=False)["input_ids"])
        return first[:1] if first and first[0] == self.tokenizer.bos_token_id else []


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
                "model's own processor as chat_template"
            )
