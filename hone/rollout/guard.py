"""The door of every server that hone runs: nothing is answered before a token was shown."""

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
    """An ASGI application around another: requests without `Authorization: Bearer <known>` get a 401, on every path.

    `known` decides about a token; compare with `same_token`. Anything but HTTP is refused.
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


def bearer_token(scope: Scope) -> str:
    """The token that a request shows; empty if it shows none."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[: len(SCHEME)].lower() == SCHEME:
            return str(value[len(SCHEME) :].decode("latin-1").strip())
    return ""


def same_token(shown: str, token: str) -> bool:
    """Whether they are equal, in a time that says nothing about where they differ; an empty one is never right."""
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())


__all__ = ["LOOPBACK", "TokenGuard", "bearer_token", "same_token"]
