"""Content in blocks, as Anthropic's Messages have it: thoughts, calls of tools and their results beside the text.

    assistant  [thinking, text, tool_use]          -> reasoning_content, content, tool_calls
    user       [tool_result, tool_result, text]    -> tool, tool, user

`data/messages.py` reads what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_THOUGHTS = ("thinking", "reasoning")
_CALLS = ("tool_use", "tool_call", "function_call")
_RESULT = "tool_result"


class BlockError(ValueError):
    """Blocks whose order no chat template can keep, or that only their own provider can read."""


def results_apart(given: Any) -> Sequence[Any]:
    """The messages that a message stands for: each result of a tool in its content is one. Raises BlockError.

    >>> results_apart({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "4"}]})
    [{'role': 'tool', 'content': '4', 'tool_call_id': '1'}]
    """
    blocks = _blocks(given)
    results = [block for block in blocks if _type(block) == _RESULT]
    if not results:
        return [given]
    rest = [block for block in blocks if _type(block) != _RESULT]
    if any(_type(block) == _RESULT for block in blocks[len(results) :]):
        raise BlockError("a message has a result of a tool after other content; results come first in it")
    found = [_result(block) for block in results]
    return [*found, {**given, "content": rest}] if rest else found


def without_blocks(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer with its thoughts and calls in fields of their own; other messages as they are. Raises BlockError."""
    blocks = _blocks(message)
    kinds = [_type(block) for block in blocks]
    if not {*_THOUGHTS, *_CALLS, "redacted_thinking"}.intersection(kinds):
        return message
    if "redacted_thinking" in kinds:
        raise BlockError("an answer has redacted thoughts, which only their provider can read; remove the block")
    order = [0 if kind in _THOUGHTS else 2 if kind in _CALLS else 1 for kind in kinds]
    if order != sorted(order):
        raise BlockError(
            f"the content of an answer has blocks in the order {', '.join(map(str, kinds))}; chat templates have "
            "thoughts, then text, then calls of tools: make a message of each part"
        )
    thoughts = "\n".join(_thought(block) for block, place in zip(blocks, order, strict=True) if place == 0)
    calls = [_call(block) for block, place in zip(blocks, order, strict=True) if place == 2]
    if calls and message.get("tool_calls"):
        raise BlockError("an answer has tool_calls and blocks of calls in its content; leave one of them")
    shown = [block for block, place in zip(blocks, order, strict=True) if place == 1]
    fields = {**({"thinking": thoughts} if thoughts else {}), **({"tool_calls": calls} if calls else {})}
    if thoughts and any(message.get(name) for name in ("reasoning_content", *_THOUGHTS)):
        raise BlockError("an answer has thoughts in a field and in its content; leave one of them")
    return {**message, "content": shown or "", **fields}


def _blocks(given: Any) -> Sequence[Any]:
    content = given.get("content") if isinstance(given, Mapping) else None
    content = [content] if isinstance(content, Mapping) else content
    return content if isinstance(content, Sequence) and not isinstance(content, str) else ()


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    call = block.get("tool_use_id") or block.get("tool_call_id")
    return {"role": "tool", "content": block.get("content") or "", **({"tool_call_id": call} if call else {})}


def _thought(block: Mapping[str, Any]) -> str:
    found = next((block[key] for key in (*_THOUGHTS, "text") if block.get(key)), "")
    parts = [found] if isinstance(found, str | Mapping) else found
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise BlockError(f"a block of thoughts should have text, found {block!r:.80}")
        texts.append(text)
    return "".join(texts)


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    inner = block.get(block["type"])  # Mistral's and others' name the call by its type
    call = inner if isinstance(inner, Mapping) else {key: value for key, value in block.items() if key != "type"}
    return {key: value for key, value in call.items() if value is not None}


__all__ = ["BlockError", "results_apart", "without_blocks"]
