"""Refusals: what a client is told when a request is not served."""

from __future__ import annotations


class Refused(Exception):
    """A request that is not served; the client is shown the text."""

    status = 400
    category = "user"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status or type(self).status


class BadRequest(Refused):
    """The request is wrong, or asks for something that is not served here."""


class NotFound(Refused):
    """There is no such thing, or it is another tenant's: both look the same."""

    status = 404


class Gone(Refused):
    """It has ended: a session that was finished, a result that is kept no more."""

    status = 410


class Busy(Refused):
    """Come again later."""

    status = 429


class Unavailable(Refused):
    """The service failed."""

    status = 500
    category = "server"
