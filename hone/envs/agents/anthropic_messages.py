"""Anthropic's Messages (`/v1/messages`).

blocks: text, tool_use, tool_result  -->  messages  -->  blocks: text, tool_use
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hone.envs.agents.images import content_of
from hone.envs.agents.protocol import (
    Answer,
    BadRequest,
    ChatRequest,
    Reply,
    event,
    form_in,
    pieces,
    schema_of,
    supported,
    text_of,
)
from hone.processes.untrusted_json import parse_json

NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # supported only at their neutral value
    "container": (None,),
    "context_management": (None,),
    "mcp_servers": (None, []),
    "thinking": (None, {"type": "disabled"}),
}
WITHOUT_EFFECT = frozenset(("cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"))
CHOICES = {"auto": "auto", "none": "none", "any": "required"}  # Anthropic's name -> that of Chat Completions
TEXT = ("text",)


class AnthropicMessages:
    """`POST /v1/messages`."""

    def read(self, data: Any) -> ChatRequest:
        fields = supported(data, NEUTRAL, WITHOUT_EFFECT)
        messages = [told for one in fields.pop("messages", ()) for told in _messages(one)]
        if system := fields.pop("system", None):
            messages.insert(0, {"role": "system", "content": text_of(system, TEXT, "system")})
        form = form_in(fields.pop("output_config", None), "output_config")
        return ChatRequest(
            messages=messages,
            json_schema=schema_of(form, "output_config.format"),
            tools=[_tool(one) for one in fields.pop("tools", None) or ()] or None,
            tool_choice=_choice(fields.pop("tool_choice", None)),
            stop=fields.pop("stop_sequences", None),
            **fields,
        )

    def whole(self, reply: Reply) -> dict[str, Any]:
        (answer,) = reply.answers
        return {
            **_head(reply),
            "content": _blocks(answer),
            **_ending(answer),
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.sampled_tokens},
            **reply.sampled(answer),
        }

    def stream(self, reply: Reply) -> Iterator[str]:
        for kind, fields in self._events(reply):
            yield event({"type": kind, **fields}, kind)

    def error(self, message: str, status: int, code: str) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "api_error"
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}

    def _events(self, reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
        (answer,) = reply.answers
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
        begun = {**_head(reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield "message_start", {"message": begun}
        for index, block in enumerate(_blocks(answer)):
            is_text = block["type"] == "text"
            empty = {**block, "text": ""} if is_text else {**block, "input": {}}
            yield "content_block_start", {"index": index, "content_block": empty}
            for piece in pieces(block["text"] if is_text else json.dumps(block["input"])):
                text = {"type": "text_delta", "text": piece}
                delta = text if is_text else {"type": "input_json_delta", "partial_json": piece}
                yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        told = {"output_tokens": reply.sampled_tokens}
        yield "message_delta", {"delta": _ending(answer), "usage": told, **reply.sampled(answer)}
        yield "message_stop", {}


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Convert one Anthropic message to Chat Completions: each tool result becomes a message."""
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant"):
        raise BadRequest(f"the role of a message should be user or assistant, found {role!r:.40}")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    shown: list[dict[str, Any]] = []  # texts and images
    calls: list[dict[str, Any]] = []
    results = 0
    for block in content:
        kind = block.get("type")
        if kind == "text" or (kind == "image" and role == "user"):
            shown.append(block)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result" and role == "user" and not shown:
            results += 1
            told = text_of(block.get("content") or "", TEXT, "a tool result")
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": told}
        else:
            raise BadRequest(f"a {role} message with a block of type {kind!r:.40} here is not supported", "unsupported")
    if shown or calls or not results:
        said = content_of(shown, role, TEXT, "image")
        yield {"role": role, "content": said, **({"tool_calls": calls} if calls else {})}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise BadRequest(f"a tool of type {tool['type']!r:.60} is not supported, only custom ones", "unsupported")
    kept = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {"type": "function", "function": {**kept, "parameters": tool["input_schema"]}}


def _choice(choice: Any) -> Any:
    """A tool choice in the form of Chat Completions."""
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    if kind not in CHOICES:
        raise BadRequest(f"tool_choice = {choice!r:.80} is not supported", "unsupported")
    return CHOICES[kind]


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """An answer as content blocks: its text, unless it only calls, then each call."""
    blocks: list[dict[str, Any]] = []
    if answer.text or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.tool_calls:
        function = call["function"]
        given = parse_json(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _ending(answer: Answer) -> dict[str, Any]:
    if answer.tool_calls:
        reason = "tool_use"
    elif answer.cut:
        reason = "max_tokens"
    else:
        reason = "end_turn" if answer.stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


__all__ = ["AnthropicMessages"]
