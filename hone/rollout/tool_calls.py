"""Tool calls in generated text, in the form that Qwen and Hermes models write.

Let me look.<tool_call>
{"name": "search", "arguments": {"query": "hone"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

ToolCall = dict[str, Any]
ParseFn = Callable[[str], tuple[str, list[ToolCall]]]
"""Generated text -> (what is left of it, the calls as `{name, arguments}`, arguments as JSON text)."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def parse_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Calls between `<tool_call>` marks. One that is not a JSON object with a name stays in the text, as it was."""
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        try:
            call = json.loads(found.group(1))
        except json.JSONDecodeError:
            return found.group(0)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return found.group(0)
        arguments = call.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"name": call["name"], "arguments": written})
        return ""

    left = _CALL.sub(take, text)
    return (left.strip() if calls else text), calls


__all__ = ["ParseFn", "ToolCall", "parse_hermes"]
