"""HTTP sessions for hone's requests to services."""

from __future__ import annotations

from typing import Any

import aiohttp


def http_session(**options: Any) -> aiohttp.ClientSession:
    """A session without limits of its own: the caller has a deadline for each request and bounds their number.

    By default aiohttp ends every request after five minutes, and has 100 connections; further requests wait for one
    while their deadlines run. `options` are those of `aiohttp.ClientSession`. Call it on an event loop.
    """
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, **options)


__all__ = ["http_session"]
