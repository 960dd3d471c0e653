"""Answers to learn under a template that opens a thought for every answer (DeepSeek-R1, QwQ, Nemotron).

    row              {"content": "<think>2 + 2</think>4"}   or   {"reasoning_content": "2 + 2", "content": "4"}
    the template     ...<assistant>4<end>                   it leaves thoughts out of what was said before
    a rollout        ...<assistant><think>   2 + 2</think>4<end>       the policy goes on after the opening

A sample has the tokens of the rollout. An answer without a thought learns to close the thought at once.
"""

from __future__ import annotations

from contextlib import suppress
from typing import cast

from hone.data.messages import RenderingError
from hone.data.templates.ends import ANSWER
from hone.data.templates.forms import QUESTION, THOUGHT, Rendering
from hone.types import Message

_REASON = "thought-2c81d7"


def with_thoughts_in_content(template: Rendering, message: Message) -> Message:
    """An answer whose `reasoning_content` the template would not show, with the thought before its content."""
    thought = message.get("reasoning_content")
    mark, close = _marks(template)
    if not thought or not mark or not isinstance(message.get("content"), str):
        return message
    others = {key: value for key, value in message.items() if key != "reasoning_content"}
    said = f"{mark}\n{thought.strip()}\n{close}\n\n{message['content']}"
    return cast(Message, {**others, "content": said})


def with_thought(template: Rendering, opened: str, answered: str, message: Message) -> str | None:
    """The rendered conversation with the answer's thought after the opening; None: the template opens none there."""
    opening = template.opened_thought
    bare = opened.removesuffix(opening)
    if not opening or bare == opened or not answered.startswith(bare):
        return None
    mark, close = _marks(template)
    thought, rest = "", answered[len(bare) :]
    if rest.startswith(mark) and close in rest:
        thought, _, rest = rest.removeprefix(mark).partition(close)
    if thought.strip():
        return f"{opened}{thought.lstrip()}{close}{rest}"
    content = message.get("content")
    before, found, said = content.rpartition(close) if isinstance(content, str) else ("", "", "")
    if not found or not before.strip().removeprefix(mark).strip():
        return f"{opened}{_closing(template)}{rest.lstrip()}"
    space = said[: len(said) - len(said.lstrip())]
    return f"{opened}{before.lstrip().removeprefix(mark).lstrip()}{close}{space}{rest.lstrip()}"


def _marks(template: Rendering) -> tuple[str, str]:
    """The marks before and after a thought that the template opens; empty without one."""
    found = THOUGHT.match(template.opened_thought)
    mark = found[0] if found else ""
    return mark, f"{mark[:1]}/{mark[1:]}" if mark else ""


def _closing(template: Rendering) -> str:
    """The text with which a model ends a thought, as the template renders it where it renders thoughts."""
    close = _marks(template)[1]
    with suppress(RenderingError):
        answer = Message(role="assistant", content=ANSWER, reasoning_content=_REASON)
        between = template.render([QUESTION, answer], opening=False).partition(_REASON)[2].partition(ANSWER)[0]
        if close in between:
            return between
    return f"\n{close}\n\n"


__all__ = ["with_thought", "with_thoughts_in_content"]
