"""One rollout as the page needs it: short keys, rounded log-probs, long texts shortened."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hone.tracking.trackers.jsonl import to_float

MAX_TOKENS = 2_000  # per rollout
MAX_TURNS = 200  # of a rollout
MAX_TEXT = 20_000  # characters per prompt or response


def rollout_row(number: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a line of `rollouts.jsonl.gz`; `number`: of the line in the file, from 0.

    Answers to one prompt in one step have the same `group`.
    """
    tokens = record.get("tokens") or []
    gap = record.get("logprob_gap")
    prompt = record.get("prompt", "")
    return {
        "number": number,
        "step": record["step"],
        "set": record.get("set"),
        "group": f"{record['step']} {record.get('set') or ''} {record.get('prompt_id', '')} {record.get('draw', '')}",
        "id": f"{record.get('prompt_id', '')} #{record.get('sample', 0)} {record.get('role') or ''}".rstrip(),
        "status": str(record.get("status", "")),
        "stop": str(record.get("stop_reason", "")),
        "reward": _number(record.get("reward")),
        "components": {str(k): _number(v) for k, v in (record.get("components") or {}).items()},
        "printed": {str(name): cut(text) for name, text in (record.get("printed") or {}).items()},
        "advantage": advantage_of(record),
        "advantages": _digits(given, 4) if isinstance(given := record.get("advantages"), list) else None,
        "error": record.get("error", ""),
        "question": cut(record.get("question") or prompt),
        "prompt": cut(prompt),
        "response": cut(record.get("response", "")),
        "truth": cut(_as_text(record.get("ground_truth"))),
        "length": record.get("response_length", len(tokens)),
        "versions": record.get("weight_versions") or [],
        "conversation": [_turn(turn) for turn in (record.get("conversation") or [])[:MAX_TURNS]],
        "tokens": tokens[:MAX_TOKENS],
        "logprobs": _digits(record.get("rollout_logprobs") or [], 4),
        "gap": None if gap is None else _digits(gap, 3),
        "hidden": max(len(tokens) - MAX_TOKENS, 0),
    }


def advantage_of(record: Mapping[str, Any]) -> float | str | None:
    """The advantage of a rollout, the mean where its tokens have different ones; None if the record has none."""
    given = record.get("advantages")
    if not isinstance(given, list):
        return _number(given)
    numbers = [number for one in given if (number := to_float(one)) is not None]
    return short(math.fsum(numbers) / len(numbers)) if numbers else None


def short(value: float, digits: int = 6) -> float | str:
    """A number with so many digits; as text if it is not finite, because JSON has no such numbers."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.{digits}g}")


def cut(text: Any) -> str:
    """A text, at most `MAX_TEXT` characters of it."""
    text = str(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT:,} more characters)"


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of a conversation, with long texts shortened."""
    calls = [
        {key: cut(value) if isinstance(value, str) else value for key, value in call.items()}
        for call in turn.get("calls") or []
    ]
    said, read = (cut(turn.get(key, "")) for key in ("said", "read"))
    return {"said": said, "read": read, "reward": _number(turn.get("reward")), "calls": calls}


def _digits(values: Sequence[Any], digits: int) -> list[float | str | None]:
    return [_number(value, digits) for value in values[:MAX_TOKENS]]


def _number(value: Any, digits: int = 6) -> float | str | None:
    number = to_float(value)
    return None if number is None else short(number, digits)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
