"""Tokens per minute of each tenant: a bucket that fills evenly and may go below zero by what was begun."""

from __future__ import annotations

import time

from hone.service.disk.registry import Key

MINUTE_S = 60.0


class Quotas:
    """The buckets of all tenants; one without a limit has none."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float, float]] = {}  # tenant -> limit, tokens left, when

    def know(self, tenant: Key) -> None:
        """Begin a tenant's bucket, or take over a limit that has changed."""
        limit = float(tenant.tokens_per_minute or 0)
        if not limit:
            self._buckets.pop(tenant.name, None)
        elif self._buckets.get(tenant.name, (0.0,))[0] != limit:
            self._buckets[tenant.name] = (limit, limit, time.monotonic())

    def spend(self, tenant: str, tokens: int) -> None:
        if tenant in self._buckets:
            limit, left, at = self._filled(tenant)
            self._buckets[tenant] = (limit, left - tokens, at)

    def has_room(self, tenant: str) -> bool:
        """Return whether a tenant may begin more work now."""
        return tenant not in self._buckets or self._filled(tenant)[1] > 0

    def _filled(self, tenant: str) -> tuple[float, float, float]:
        limit, left, at = self._buckets[tenant]
        now = time.monotonic()
        return limit, min(limit, left + limit * (now - at) / MINUTE_S), now
