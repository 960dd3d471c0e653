"""Rendering: messages become tokens as the model's chat template says, and tokens that were generated stay as they are.

    render_prompt(messages)                         [system][user][opening of an answer]
    render_continuation(ids so far, new messages)   ...generated tokens[end] + [tool or user][opening of an answer]
    render_sample(messages)                         a whole conversation; the loss is on the answers and their [end]

Text is tokenised in pieces that meet where generation starts and ends, for that is where they meet in a rollout: a
token never straddles the opening of an answer and its first word. So a supervised sample has exactly the token ids
that a rollout would have if the model gave these answers.

Some templates rewrite the past (Qwen3 removes the thoughts of earlier answers once there is a new question). Token ids
here are append-only: a conversation of several turns keeps each answer as it was when it was given.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from hone.config import ConfigError
from hone.data.images import (
    ImageError,
    ImageReader,
    encoded,
    images_in,
    is_image,
    parts_of,
    source_of,
    with_sources,
    without_images,
)
from hone.types import Image, Message

_ANSWER = "answer-7f3d9c"  # stands for an answer in a rendered example; no template has a reason to touch it
_ENDLESS = (  # what a template renders, without the end token that nothing but space comes after
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
    """Messages that a chat template cannot render, or whose answers cannot be told from the rest."""


class Renderer:
    """Messages to token ids and back, for one tokenizer.

    A tokenizer without a chat template is used plainly: the contents of the messages one after another, with nothing
    between them, the tokenizer's own first token (if it has one) before, and its end-of-sequence token after an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str = "",
        chat_options: Mapping[str, Any] | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        """`tokenizer` is a transformers tokenizer; `chat_template` is Jinja2 text or a file of it, empty: its own.

        Without an `image_reader`, messages that show images are refused.

        Raises RenderingError if there is no such file, or if chat options are given to a tokenizer without a template.
        """
        self.tokenizer = tokenizer
        self._options = dict(chat_options or {})
        self._images = image_reader
        self._template = _template_text(tokenizer, chat_template)
        if self._template is None and self._options:
            raise RenderingError(
                f"chat_options {sorted(self._options)} are set, but the tokenizer has no chat template"
            )
        self._special = _special_tokens(tokenizer)
        self._specials = re.compile("|".join(re.escape(text) for text in sorted(self._special, key=len)[::-1]))
        self._first = self._first_ids()

    # ------------------------------------------------------------------------------------------------- the verbs

    def with_images(self, messages: Sequence[Message], folder: Path = Path()) -> tuple[Message, ...]:
        """The messages with every image read: `image` of each image part is an `Image`; the other verbs want that.

        Paths are relative to `folder`. Raises RenderingError naming an image that is missing or broken, or if the
        model takes no images.
        """
        if not any(is_image(part) for part in parts_of(messages)):
            return tuple(messages)
        return with_sources(messages, lambda part: {"image": self._read(part, folder)})

    def _read(self, part: Mapping[str, Any], folder: Path) -> Image:
        if self._images is None:
            raise RenderingError("the messages show an image, but this model takes text only")
        source = source_of(part)
        try:
            return source if isinstance(source, Image) else self._images.image(encoded(source, folder))
        except (ImageError, ValueError) as error:
            named = isinstance(error, ImageError) or not isinstance(source, str | Path)
            raise RenderingError(str(error) if named else f"image {source!s:.200}: {error}") from error

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """The ids of a conversation that the model is to answer, opening of the answer included."""
        if not messages:
            raise RenderingError("there are no messages to render")
        if messages[-1].get("role") == "assistant":
            raise RenderingError("the last message is the assistant's: there is nothing to answer")
        ids = self._first + self._encode(self._text(messages, opening=True, tools=tools))
        return tuple(Expansion(self._images, messages).all_of(ids))

    def render_finished(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of a conversation that is over, all that the template adds after its last message included."""
        ids = tuple(self._first + self._encode(self._text(messages, opening=False)))
        return ids if self._template is not None else (*ids, self._end)

    def render_continuation(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
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
            raise RenderingError("messages after the first answer show an image; only a prompt can show any")
        after = self._encode(self._continuation_text(messages, tools))
        return tuple(after if ids[-1] in self.end_token_ids else [self._end, *after])

    def render_sample(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, loss mask) of a conversation: the mask is 1 on every answer of the assistant and its end token.

        The template's `{% generation %}` marks say what an answer is, if it has them; otherwise each answer is what
        the template adds to the opening of that answer. Nothing is rendered after the last answer.

        Raises RenderingError if there is no answer, or if the template does not render an answer after its opening.
        """
        if not any(message.get("role") == "assistant" for message in messages):
            raise RenderingError("the messages have no answer of the assistant to learn from")
        end = self._end
        if self._template is not None and _GENERATION.search(self._template):
            pieces = self._marked_pieces(messages, tools)
        else:
            pieces = self._grown_pieces(messages, tools)
        ids, mask = list(self._first), [0] * len(self._first)
        expansion = Expansion(self._images, messages)
        for text, learnt in pieces:
            piece = expansion.next_of(self._encode(text), learnt)
            ids += piece
            mask += [int(learnt)] * len(piece)
            if learnt and self._template is None:
                ids.append(end)
                mask.append(1)
        expansion.end()
        if mask:
            mask[0] = 0  # a first token has no log-prob
        return tuple(ids), tuple(mask)

    def render_steps(
        self, messages: Sequence[Message], steps: Sequence[str], separator: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, mask) of an answer in steps: the mask is 1 on the token that follows each step.

        That is the separator's first token, and after the last step the end token. Steps and separators are tokenised
        apart, so that no token belongs to two of them.
        """
        ids, marks = list(self.render_prompt(messages)), []
        for number, step in enumerate(steps):
            if number and separator:
                ids += self._encode(separator)
            ids += self._encode(step)
            marks.append(len(ids))
        ids.append(self._end)
        return tuple(ids), tuple(int(position in marks) for position in range(len(ids)))

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of generated ids, special tokens left out unless asked for."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False)
        )

    def save_template(self, folder: Path) -> None:
        """Give the tokenizer in `folder`, which is this one, the template in use if that is another than its own."""
        if self._template is None or self._template == self.tokenizer.chat_template:
            return
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = self._template
        tokenizer.save_pretrained(folder)

    def save_endless_template(self, folder: Path) -> None:
        """Give the tokenizer in `folder` a template by which a finished conversation stops before its end token.

        That is where a value model of this renderer's answers is read; a sequence classifier is read at the last token.
        """
        tokenizer = copy.deepcopy(self.tokenizer)
        ends = [tokenizer.convert_ids_to_tokens(end) for end in sorted(self.end_token_ids)]
        first = tokenizer.bos_token if self._first else ""
        plain = f"{{{{ {first!r} }}}}{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}"
        whole = plain if self._template is None else self._template.removesuffix("\n")
        tokenizer.chat_template = _ENDLESS.replace("WHOLE", whole).replace("ENDS", repr(ends))
        tokenizer.save_pretrained(folder)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the template's end of a turn, and the tokenizer's end of a sequence."""
        return frozenset(end for end in (self._end_or_none, self.tokenizer.eos_token_id) if end is not None)

    # ---------------------------------------------------------------------------------------------------- pieces

    def _grown_pieces(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """The conversation as it grows: (text, whether it is an answer), turn after turn.

        For each answer the template is asked twice: for everything before it with the opening of an answer, and for
        everything up to it. The second must begin with the first, and what it adds is the answer.
        """
        pieces: list[tuple[str, bool]] = []
        grown, previous = "", -1
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            opened = self._text(messages[:index], opening=True, tools=tools)
            answered = self._text(messages[: index + 1], opening=False, tools=tools)
            if not answered.startswith(opened):
                raise RenderingError(_differs(index, opened, answered))
            if opened.startswith(grown):
                between = opened[len(grown) :]
            else:  # the template rewrites the past: keep it, and render what is new
                between = self._continuation_text(messages[previous + 1 : index], tools)
            answer = self._cut_after_end(answered[len(opened) :], index)
            pieces += [(between, False), (answer, True)]
            grown, previous = opened + answer, index
        return pieces

    def _marked_pieces(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """The whole rendered conversation, cut where the template's generation marks begin and end."""
        assert self._template is not None
        marked = _END_GENERATION.sub(_MARKED[1], _GENERATION.sub(_MARKED[0], self._template))
        text = self._text(messages, opening=False, tools=tools, template=marked)
        pieces: list[tuple[str, bool]] = []
        before, *rest = text.split(_OPEN)
        for part in rest:
            answer, _, after = part.partition(_CLOSE)
            end = self._specials.match(after, len(after) - len(after.lstrip()))
            if (
                end and self._special[end.group()] in self.end_token_ids
            ):  # the marks leave out the end token: take it in
                answer, after = answer + after[: end.end()], after[end.end() :]
            pieces += [(before, False), (answer, True)]
            before = after
        if not pieces:
            raise RenderingError("the chat template has generation marks, but marks nothing in these messages")
        return pieces

    def _cut_after_end(self, answer: str, index: int) -> str:
        """What the model generates of a rendered answer: up to its last special token, not the line break after it."""
        if self._template is None:
            return answer
        ends = list(self._specials.finditer(answer))
        if not ends or answer[ends[-1].end() :].strip():
            raise RenderingError(f"message {index}: the chat template renders no end token after {answer[-60:]!r}")
        return answer[: ends[-1].end()]

    def _continuation_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """What comes between an answer's end token and the next answer.

        Found by rendering an example with a stand-in for the answer, so that nothing generated is needed as text.
        """
        if self._template is None:
            return self._text(messages, opening=True)
        example = [Message(role="user", content="question"), Message(role="assistant", content=_ANSWER)]
        text = self._text([*example, *messages], opening=True, tools=tools)
        _, found, after = text.rpartition(_ANSWER)
        end = self._specials.search(after)
        if not found or end is None or not self._ends_answer(end.group(), after[: end.start()]):
            raise RenderingError(f"the chat template renders no end token between an answer and {_roles(messages)}")
        return after[end.end() :]

    def _ends_answer(self, token: str, before: str) -> bool:
        """Whether a special token, after `before`, is what stands for the end of an answer that others follow.

        Some templates (gpt-oss) keep an answer with another end token than it was generated with; what was generated
        stays. A token that a conversation begins with begins a message, and ends none.
        """
        if self._special[token] == self._end:
            return True
        begins = self._text([Message(role="user", content="question")], opening=False).lstrip()
        return not before.strip() and not begins.startswith(token)

    # -------------------------------------------------------------------------------------------- template, tokens

    def _text(
        self,
        messages: Sequence[Message],
        *,
        opening: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
    ) -> str:
        if self._template is None:
            return "".join(_plain_content(message) for message in messages)
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in without_images(messages)],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=template or self._template,
                    add_generation_prompt=opening,
                    tokenize=False,
                    **self._options,
                )
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise RenderingError(f"the chat template cannot render {_roles(messages)}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    def _first_ids(self) -> list[int]:
        """Without a template, the tokenizer's own first token; a template writes it itself."""
        if self._template is not None:
            return []
        first = list(self.tokenizer("", verbose=False)["input_ids"])
        return first[:1] if first and first[0] == self.tokenizer.bos_token_id else []

    @property
    def _end(self) -> int:
        if self._end_or_none is None:
            raise RenderingError(
                "the chat template (or, without one, the tokenizer) ends an answer with no special token, so a model "
                "could not learn to stop; give a template that does as chat_template"
            )
        return self._end_or_none

    @cached_property
    def _end_or_none(self) -> int | None:
        """The special token with which the template ends an answer, from a rendered example."""
        if self._template is None:
            return None if self.tokenizer.eos_token_id is None else int(self.tokenizer.eos_token_id)
        example = [Message(role="user", content="question"), Message(role="assistant", content=_ANSWER)]
        _, found, after = self._text(example, opening=False).rpartition(_ANSWER)
        end = self._specials.match(after.lstrip()) if found and self._special else None
        return self._special[end.group()] if end else None


class Expansion:
    """Puts as many placeholders in the place of each image as the model wants, piece by piece of a conversation."""

    def __init__(self, reader: ImageReader | None, messages: Sequence[Message]) -> None:
        """Raises RenderingError for an image that was not read (`Renderer.with_images`)."""
        self._token_id = reader.token_id if reader is not None else None
        self._images = images_in(messages)
        self._placed = 0
        if len(self._images) != sum(is_image(part) for part in parts_of(messages)):
            raise RenderingError("the messages show an image that was not read; a model of text only takes none")

    def all_of(self, ids: Sequence[int]) -> list[int]:
        """A whole conversation's ids."""
        whole = self.next_of(ids)
        self.end()
        return whole

    def next_of(self, ids: Sequence[int], learnt: bool = False) -> list[int]:
        """The ids of the next piece. Raises RenderingError if it has a placeholder where no image is, or learns one."""
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
    """Text -> id of every token that no ordinary text gives."""
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def _plain_content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RenderingError(f"without a chat template a message's content should be text, found {content!r:.60}")
    return content


def _roles(messages: Sequence[Message]) -> str:
    return "the roles " + ", ".join(str(message.get("role")) for message in messages)


def _differs(index: int, opened: str, answered: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(opened, answered, strict=False)) if a != b), len(answered))
    return (
        f"message {index}: the chat template does not render the answer after its own opening (it opens with "
        f"{opened[at : at + 40]!r} where the answer has {answered[at : at + 40]!r}), so what the model is to learn "
        "cannot be told; use a template with {% generation %} marks, or other chat_options"
    )
