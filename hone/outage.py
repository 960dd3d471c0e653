"""The error of services: their own message says all that a user needs, so commands print it without a traceback."""

from __future__ import annotations


class Outage(RuntimeError):
    """A service that hone uses refused, failed, or did not answer; the message names it, the reason and the remedy."""
