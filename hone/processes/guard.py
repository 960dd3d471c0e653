"""The token check of every HTTP server that hone runs."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCHEME = b"bearer "
REFUSAL = b'{"error": {"message": "a bearer token is needed", "type": "authentication_error", "code": 401}}'
LOOPBACK = "127.0.0.1"


class TokenGuard:
    """ASGI middleware: a request without `Authorization: Bearer <known token>` gets a 401, on every path.

    `known` says whether a token is valid; compare with `same_token`. Connections other than HTTP are refused.
    """

    def __init__(self, app: App, known: Callable[[str], bool]) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._known(bearer_token(scope))):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})


class PathToken:
    """ASGI middleware: `/s/TOKEN/rest` is `/rest` with that token, for clients that send a key of their own."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope["path"].split("/", 3) if scope["type"] == "http" else []
        if len(parts) == 4 and parts[1] == "s":
            others = [one for one in scope["headers"] if one[0] != b"authorization"]
            told = (b"authorization", f"Bearer {parts[2]}".encode())
            path = f"/{parts[3]}"
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": [told, *others]}
        await self._app(scope, receive, send)


def bearer_token(scope: Scope) -> str:
    """The bearer token of a request; empty if it has none."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[: len(SCHEME)].lower() == SCHEME:
            return str(value[len(SCHEME) :].decode("latin-1").strip())
    return ""


def same_token(given: str, token: str) -> bool:
    """Return whether two tokens are equal, compared in constant time; an empty token is never valid."""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


__all__ = ["LOOPBACK", "App", "PathToken", "Receive", "Scope", "Send", "TokenGuard", "bearer_token", "same_token"]
