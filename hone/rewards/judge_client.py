"""A language model at any OpenAI-compatible address that judges: asked with retries and deadlines, its verdicts kept.

`judge` asks it. The worker processes import this file, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from hone.processes.http_client import http_session, proxy_of
from hone.processes.untrusted_json import parse_json

MOST_REMEMBERED = 10_000  # verdicts in the memory of one process
LARGEST_REPLY = 1 << 20  # bytes
FIRST_PAUSE_S = 0.5  # before the first retry; doubles
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # statuses that another attempt may not get
REQUEST = {"temperature": 0, "max_tokens": 1024}
Verdict = dict[str, float]  # what was read from a reply
_REMEMBERED: OrderedDict[str, Verdict] = OrderedDict()


class JudgeFailed(RuntimeError):
    """The judge gave no verdict; the message says why."""


class _Outage(RuntimeError):
    """An attempt failed, and another one may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeClient:
    """Address of a judge, and the options that all judges have. Wrong ones raise ValueError.

    `request`: further fields of the request; a null removes one of `REQUEST`. `cache`: folder that keeps verdicts by
    their content, for other processes and later runs.
    """

    url: str
    model: str
    attempt_timeout_s: float = 60.0
    retries: int = 2
    request: Mapping[str, Any] = field(default_factory=dict)
    api_key_variable: str = "OPENAI_API_KEY"
    cache: str = ""

    def __post_init__(self) -> None:
        for name, least in (("retries", 0), ("attempt_timeout_s", 1e-3)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} should be at least {least}, found {getattr(self, name)}")

    async def verdict(self, system: str, user: str, read: Callable[[str], Verdict]) -> Verdict:
        """Ask, and `read` the reply. A question that was answered before is not asked again. Raises JudgeFailed.

        `read` raises JudgeFailed for a reply that is no verdict, which is not kept.
        """
        others = {name: value for name, value in {**REQUEST, **self.request}.items() if value is not None}
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {"model": self.model, "messages": messages, **others}
        key = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        found = _remembered(key, self.cache)
        if found is None:
            found = read(await self._asked(body))
            _remember(key, found, self.cache)
        return found

    async def _asked(self, body: Mapping[str, Any]) -> str:
        """The text of the judge's reply. An outage is retried; the component's deadline ends all attempts."""
        key = os.environ.get(self.api_key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        problem = ""
        async with http_session(headers=headers) as session:
            for attempt in range(self.retries + 1):
                if attempt:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
                try:
                    return await self._attempt(session, body)
                except _Outage as error:
                    problem = str(error)
        raise JudgeFailed(f"the judge at {self.url} gave no verdict: {problem}")

    async def _attempt(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> str:
        address = f"{self.url.rstrip('/')}/chat/completions"
        try:
            async with (
                asyncio.timeout(self.attempt_timeout_s),
                session.post(address, json=body, proxy=proxy_of(address)) as response,
            ):
                text = await _text_of(response)
        except TimeoutError as error:
            raise _Outage(f"no reply within {self.attempt_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Outage(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return _content(text)
        problem = f"HTTP status {response.status}: {' '.join(text.split())[:200]}"
        if response.status in PASSING:
            raise _Outage(problem)
        raise JudgeFailed(f"the judge at {self.url} gave no verdict: {problem}")


async def _text_of(response: aiohttp.ClientResponse) -> str:
    held = bytearray()
    async for piece in response.content.iter_any():
        held += piece
        if len(held) > LARGEST_REPLY:
            raise JudgeFailed(f"the judge's reply has more than {LARGEST_REPLY:,} bytes")
    return held.decode(errors="replace")


def _content(text: str) -> str:
    try:
        return str(parse_json(text)["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise JudgeFailed(f"the judge's reply has no choices[0].message.content: {text[:200]!r}") from error


def _remembered(key: str, folder: str) -> Verdict | None:
    if key in _REMEMBERED:
        _REMEMBERED.move_to_end(key)
        return _REMEMBERED[key]
    file = Path(folder) / f"{key}.json"
    if not folder or not file.is_file():
        return None
    try:
        found: Verdict = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JudgeFailed(f"{file} in the judge's cache is not JSON; delete it") from error
    return found


def _remember(key: str, scores: Verdict, folder: str) -> None:
    _REMEMBERED[key] = scores
    if len(_REMEMBERED) > MOST_REMEMBERED:
        _REMEMBERED.popitem(last=False)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        fresh = Path(folder) / f"{key}.{os.getpid()}.tmp"
        fresh.write_text(json.dumps(scores), encoding="utf-8")
        fresh.replace(Path(folder) / f"{key}.json")


__all__ = ["JudgeClient", "JudgeFailed", "Verdict"]
