"""Beginnings and ends of answers in the rendered text of a conversation to learn from."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import cast

from hone.data.messages import RenderingError, Tools
from hone.data.templates.ends import without_opening
from hone.data.templates.forms import THOUGHT, Rendering
from hone.data.templates.thoughts import with_thought, with_thoughts_in_content
from hone.types import Message

LOG = logging.getLogger("hone")
Pieces = list[tuple[str, int | None]]
"""(text, number of the message whose answer it is; None: no answer)."""

_OPEN, _CLOSE = "\ufdd1", "\ufdd2"  # around what `{% generation %}` marks; `Guard` removes them from messages
_DIGITS = "".join(map(chr, range(0xFDE0, 0xFDEA)))  # of the number of a message
_NUMBERED = re.compile(f"[{_DIGITS}]+")
_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_MARKED = (
    rf'{{%\1 filter replace("", "{_OPEN}", 1) | reverse | replace("", "{_CLOSE}", 1) | reverse \2%}}',
    r"{%\1 endfilter \2%}",
)


def conversation_pieces(
    template: Rendering, text: str | None, messages: Sequence[Message], tools: Tools = ()
) -> Pieces:
    """A conversation in pieces; nothing is rendered after the last answer. `text` is the template's text for it.

    The template's `{% generation %}` marks say what an answer is, if it has them. Otherwise an answer is what the
    template adds to the opening of that answer. Raises RenderingError if the answers cannot be found.
    """
    if text is not None and _GENERATION.search(text):
        return _marked_pieces(template, text, messages, tools)
    return _grown_pieces(template, messages, tools)


def _grown_pieces(template: Rendering, messages: Sequence[Message], tools: Tools) -> Pieces:
    """Pieces from renderings of the conversation as it grows.

    For each answer the template renders everything before it with the opening of an answer, and everything up to it.
    The second must begin with the first, and the rest of it is the answer.
    """
    pieces: Pieces = []
    grown, previous = "", -1
    if template.hides_thoughts(tools):
        messages = [with_thoughts_in_content(template, message) for message in messages]
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if index == 0 and template.text is not None:
            raise RenderingError(
                "message 0 is the assistant's: there is nothing that it answers; begin with a message of the user or "
                "the system, or remove it"
            )
        opened = template.render(messages[:index], opening=True, tools=tools)
        answered = template.render(messages[: index + 1], opening=False, tools=tools)
        if not answered.startswith(opened):
            thoughtful = with_thought(template, opened, answered, message)
            if thoughtful is None:
                raise RenderingError(_differs(index, opened, answered))
            answered = thoughtful
        if opened.startswith(grown):
            between = opened[len(grown) :]
        else:  # the template rewrites earlier turns: keep them, and render what is new
            between = template.continuation(messages[previous + 1 : index], tools)
        answer = _to_its_end(template, answered[len(opened) :], messages, index)
        pieces += [(between, None), (answer, index)]
        grown, previous = opened + answer, index
    return pieces


def _marked_pieces(template: Rendering, text: str, messages: Sequence[Message], tools: Tools) -> Pieces:
    """Pieces of the whole rendered conversation, cut at the template's generation marks.

    A template may mark some answers only, so each answer carries the number of its message.
    """
    if template.hides_thoughts(tools):
        messages = [with_thoughts_in_content(template, message) for message in messages]
    pieces = _cut_at_marks(template, text, messages, tools)
    last = max((of for _, of in pieces if of is not None), default=0)
    for of in {of for _, of in pieces if of is not None and of < last and _is_shortened_later(messages[of])}:
        try:
            own = _cut_at_marks(template, text, messages[: of + 1], tools)
        except RenderingError:  # it needs a question, which comes later
            continue
        (first, end), (start, stop) = _span(pieces, of), _span(own, of)
        if not any(piece.strip() for piece, other in pieces[first:end] if other is None):
            pieces[first:end] = own[start:stop]
    return pieces


def _span(pieces: Pieces, of: int) -> tuple[int, int]:
    """The first of the pieces of an answer, and the one after its last."""
    places = [number for number, piece in enumerate(pieces) if piece[1] == of]
    return (places[0], places[-1] + 1) if places else (0, 0)


def _is_shortened_later(message: Message) -> bool:
    """Return whether a template may leave a part of an answer out once it is not the last one: its thoughts."""
    content = message.get("content")
    said = content if isinstance(content, str) else ""
    return bool(message.get("reasoning_content") or THOUGHT.search(said) or (said and message.get("tool_calls")))


def _cut_at_marks(template: Rendering, text: str, messages: Sequence[Message], tools: Tools) -> Pieces:
    """Pieces of one rendering; each answer follows what a rollout has before it, as far as the template allows."""
    marked = _END_GENERATION.sub(_MARKED[1], _GENERATION.sub(_MARKED[0], text))
    answers = [index for index, one in enumerate(messages) if one.get("role") == "assistant"]
    numbered = [_numbered(one, index) if index in answers else one for index, one in enumerate(messages)]
    whole = template.render(numbered, opening=False, tools=tools, template=marked)
    pieces: Pieces = []
    before, *rest = whole.split(_OPEN)
    number, reached = answers[0] if answers else 0, before  # the text before the next answer
    for part in rest:
        answer, _, after = part.partition(_CLOSE)
        earlier = reached.removesuffix(before)
        reached += answer + after
        end = template.specials.match(after, len(after) - len(after.lstrip()))
        left_out = end is not None and template.special[end.group()] in template.ends
        if pieces and not before.strip() and not template.specials.sub("", _NUMBERED.sub("", answer)).strip():
            length = None if _ended(template, pieces[-1][0]) else _ended(template, answer)
            if length:  # marks around the end alone
                pieces[-1] = (pieces[-1][0] + before + answer[:length], pieces[-1][1])
                before = ""
            before += answer[length or 0 :] + after  # a token after the end of an answer is in no rollout
            continue
        if end is not None and left_out and not _ended(template, answer):  # the marks leave the end token out
            answer, after = answer + after[: end.end()], after[end.end() :]
        if found := _NUMBERED.search(answer):
            number = int("".join(str(_DIGITS.index(digit)) for digit in found[0]))
        before, answer = without_opening(template, before, template.ending.as_learnt(answer))
        if all(of != number for _, of in pieces):
            before, answer = _as_opened(template, messages, number, tools, (earlier, before, answer))
        length = _ended(template, answer) or len(answer)
        pieces += [(before, None), (answer[:length], number)]
        before = answer[length:] + after
    if not pieces:
        raise RenderingError("the chat template has generation marks, but marks nothing in these messages")
    pieces = _all_ended(template, messages, pieces, before)
    return [(_NUMBERED.sub("", piece), of) for piece, of in pieces]


def _as_opened(
    template: Rendering, messages: Sequence[Message], index: int, tools: Tools, texts: tuple[str, str, str]
) -> tuple[str, str]:
    """The text before an answer and the answer, with the opening that a rollout has there.

    `texts`: what the template rendered before, up to the answer, and for it. An opening may differ from what the
    template renders for a finished answer: it opens a thought, or the turn goes on after the results of tools.
    """
    reached, before, answer = texts
    try:
        opened = template.render(messages[:index], opening=True, tools=tools)
    except RenderingError:  # no rollout begins there: before a question, or after another answer
        return before, answer
    plain = _NUMBERED.sub("", reached)
    if not opened.startswith(plain):
        return before, answer  # the template rewrites earlier turns
    expected = opened[len(plain) :]
    if before == expected:
        return before, answer
    if (before + answer).startswith(expected):
        return expected, (before + answer)[len(expected) :]
    thoughtful = with_thought(template, expected, before + answer, messages[index])
    if thoughtful is not None:
        return expected, thoughtful[len(expected) :]
    if before.removeprefix(expected) == template.opening:
        return expected, answer
    if not before.endswith(template.opening):
        pairs = enumerate(zip(expected, before, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), min(len(expected), len(before)))
        _tell_difference(expected[same:], before[same:])
    return before, answer


@functools.lru_cache(maxsize=64)
def _tell_difference(opened: str, rendered: str) -> None:
    """Warn, once, that a sample has another text before an answer than a rollout."""
    LOG.warning(
        "in a rollout the chat template opens an answer with %r where it renders %r before the answer of a sample: the "
        "model learns answers after other tokens than it generates them. Set data.chat_template to one that renders "
        "both alike, or data.chat.options (such as {enable_thinking: true}) to what the data fits",
        opened[:60], rendered[:60],
    )  # fmt: skip


def _all_ended(template: Rendering, messages: Sequence[Message], pieces: Pieces, rest: str) -> Pieces:
    """The pieces with an end after each answer; `rest` is the text after them.

    A template may leave it out: then the marked text is followed by what begins the next message, or by nothing.
    """
    last = {of: number for number, (_, of) in enumerate(pieces) if of is not None}
    found = [*pieces]
    for of in last.keys() - {of for piece, of in pieces if _ended(template, _NUMBERED.sub("", piece))}:
        if _goes_on(messages, of):
            continue
        piece, after = pieces[last[of]][0], "".join(text for text, _ in pieces[last[of] + 1 : last[of] + 2]) or rest
        if not after.strip() or (template.special and template.specials.match(after.lstrip())):
            found[last[of]] = (piece + template.ending.of(messages[of]), of)
    return found


def _goes_on(messages: Sequence[Message], index: int) -> bool:
    """Return whether another answer follows an answer, without a message in between that would end it."""
    return any(one.get("role") == "assistant" for one in messages[index + 1 : index + 2])


def _numbered(message: Message, index: int) -> Message:
    """An answer whose texts end with its number."""
    number, changed = "".join(_DIGITS[int(digit)] for digit in str(index)), dict(message)
    for key in ("content", "reasoning_content"):
        said = message.get(key)
        if isinstance(said, str) and said.strip():
            changed[key] = said.rstrip() + number + said[len(said.rstrip()) :]
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "name": call["function"]["name"] + number}}
            for call in message["tool_calls"]
        ]
    return cast(Message, changed)


def _ended(template: Rendering, answer: str) -> int | None:
    """The length of a rendered answer with the token that ends it, None without one.

    Templates such as Phi-3's render another token after the end of the last answer, which no rollout has.
    """
    length, bound = None, len(answer)
    for found in reversed(list(template.specials.finditer(answer)) if template.special else []):
        if answer[found.end() : bound].strip():
            break
        bound = found.start()
        if template.special[found.group()] in template.ends:
            length = found.end()
    return length


def _to_its_end(template: Rendering, answer: str, messages: Sequence[Message], index: int) -> str:
    """A rendered answer up to the token that ends it: the first end token, or else the last special token.

    Where the template leaves it out, or it begins the next message, it is added as in a rollout: without it, the model
    would learn never to stop.
    """
    if template.text is None:
        return answer
    length = _ended(template, answer)
    if length is not None:
        return answer[:length]
    if template.ending.begin_next:
        return answer if _goes_on(messages, index) else answer + template.ending.of(messages[index])
    ends = list(template.specials.finditer(answer))
    if not ends or answer[ends[-1].end() :].strip():
        raise RenderingError(f"message {index}: the chat template renders no end token after {answer[-60:]!r}")
    answer = answer[: ends[-1].end()]
    return answer + template.ending.of(messages[index]) if template.ending.is_of_call(ends[-1].group()) else answer


def _differs(index: int, opened: str, answered: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(opened, answered, strict=False)) if a != b), len(answered))
    return (
        f"message {index}: the chat template does not render the answer after its own opening (it opens with "
        f"{opened[at : at + 40]!r} where the answer has {answered[at : at + 40]!r}), so the tokens to learn cannot be "
        "found; use a template with {% generation %} marks, or other data.chat.options"
    )
