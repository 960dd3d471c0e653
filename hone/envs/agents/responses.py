"""OpenAI's Responses (`/v1/responses`), without state: a request has the whole history as its input.

input items: message, function_call, function_call_output  -->  messages  -->  output items: message, function_call
"""

from __future__ import annotations

import time
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
    openai_error,
    pieces,
    schema_of,
    supported,
    text_of,
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # supported only at their neutral value
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
)
LOGPROBS = "message.output_text.logprobs"  # in `include`
TEXTS = ("input_text", "output_text")


class Responses:
    """`POST /v1/responses`."""

    error = staticmethod(openai_error)

    def read(self, data: Any) -> ChatRequest:
        fields = supported(data, NEUTRAL, WITHOUT_EFFECT)
        messages = _messages(fields.pop("input", None))
        if instructions := fields.pop("instructions", None):
            messages.insert(0, {"role": "system", "content": instructions})
        form = form_in(fields.pop("text", None), "text")
        return ChatRequest(
            messages=messages,
            json_schema=schema_of(form, "text.format"),
            tools=[_tool(one) for one in fields.pop("tools", None) or ()] or None,
            tool_choice=_choice(fields.pop("tool_choice", None)),
            max_tokens=fields.pop("max_output_tokens", None),
            logprobs=LOGPROBS in (fields.pop("include", None) or ()),
            **fields,
        )

    def whole(self, reply: Reply) -> dict[str, Any]:
        (answer,) = reply.answers
        return {
            **_head(reply, "incomplete" if answer.cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
            "output": _items(reply, answer),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.sampled_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
            },
        }

    def stream(self, reply: Reply) -> Iterator[str]:
        for number, (kind, fields) in enumerate(self._events(reply)):
            yield event({"type": kind, "sequence_number": number, **fields}, kind)

    def _events(self, reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
        begun, whole = _head(reply, "in_progress"), self.whole(reply)
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(whole["output"]):
            is_text = item["type"] == "message"
            empty: dict[str, Any] = {"content": []} if is_text else {"arguments": ""}
            begun_item = {**item, "status": "in_progress", **empty}
            yield "response.output_item.added", {"output_index": index, "item": begun_item}
            place = {"item_id": item["id"], "output_index": index}
            yield from _text_events(item, place) if is_text else _call_events(item, place)
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield f"response.{whole['status']}", {"response": whole}


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages of an input; an answer's text and calls, which are items of their own, become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest(f"input should be a text or a list of items, found {given!r:.80}")
    messages: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            content = content_of(item["content"], item["role"], TEXTS, "input_image")
            messages.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            told = text_of(item["output"], TEXTS, "the output of a call")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": told})
        else:
            raise BadRequest(f"an input item of type {kind!r:.60} is not supported", "unsupported")
    return messages


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"a tool of type {tool.get('type')!r:.60} is not supported, only functions", "unsupported")
    kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def _choice(choice: Any) -> Any:
    """A tool choice in the form of Chat Completions."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _head(reply: Reply, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _items(reply: Reply, answer: Answer) -> list[dict[str, Any]]:
    """An answer as output items: its text, unless it only calls, then each call."""
    status = "incomplete" if answer.cut else "completed"
    items: list[dict[str, Any]] = []
    if answer.text or not answer.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        pairs = zip(answer.tokens, answer.completion.logprobs, strict=True) if answer.tokens else ()
        part["logprobs"] = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in pairs
        ]
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": status}
        items.append({**message, "content": [part], **reply.sampled(answer)})
    for number, call in enumerate(answer.tool_calls):
        named = {"type": "function_call", "id": f"fc_{reply.id}_{number}", "call_id": call["id"], **call["function"]}
        items.append({**named, "status": "completed"})
    return items


def _text_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    (part,) = item["content"]
    at = {**place, "content_index": 0}
    yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
    for piece in pieces(part["text"]):
        yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": part["logprobs"]}
    yield "response.content_part.done", {**at, "part": part}


def _call_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for piece in pieces(item["arguments"]):
        yield "response.function_call_arguments.delta", {**place, "delta": piece}
    told = {"name": item["name"], "arguments": item["arguments"]}
    yield "response.function_call_arguments.done", {**place, **told}


__all__ = ["Responses"]
