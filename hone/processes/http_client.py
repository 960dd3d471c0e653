"""HTTP sessions for hone's requests to services, and the proxy on the way to them."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp


def http_session(**options: Any) -> aiohttp.ClientSession:
    """A session without limits of its own: the caller has a deadline for each request and bounds their number.

    By default aiohttp ends every request after five minutes, and has 100 connections; further requests wait for one
    while their deadlines run. `options` are those of `aiohttp.ClientSession`. Call it on an event loop.
    """
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, **options)


def proxy_of(url: str) -> str | None:
    """The proxy for a service outside, by HTTP_PROXY, HTTPS_PROXY and NO_PROXY; loopback addresses have none.

    aiohttp's `trust_env` would also send passwords from ~/.netrc, and fail where a request has a key of its own. Raises
    aiohttp.ClientError for a proxy that does not speak HTTP.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_loopback(host) or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    found = getproxies().get(parts.scheme)
    if found is None:
        return None
    kind, separator, _ = found.partition("://")
    if not separator:
        return f"http://{found}"
    if kind.lower() not in ("http", "https"):
        raise aiohttp.ClientError(
            f"{parts.scheme.upper()}_PROXY names a proxy of kind {kind}; hone speaks HTTP to proxies"
        )
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


__all__ = ["http_session", "proxy_of"]
