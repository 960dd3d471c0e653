"""Base of all suites: failed checks, checks that cannot run here, and the runner of one suite.

A check is a method `test_*` whose docstring says what holds. It raises `Broken` (by `require`) if it does not, or
`Absent` if this machine or this part lacks what the check is about; pytest shows the one as a failure, the other as
skipped. A check may write down what it measured in `self.figures`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any, ClassVar, TypeVar
from unittest import SkipTest

T = TypeVar("T")


class Broken(AssertionError):
    """A part does not do what its contract says."""


class Absent(SkipTest):
    """The reason that a check cannot run: something is not on this machine, or the part does not have it."""


def require(holds: bool, problem: str) -> None:
    """Raise Broken with the problem unless it holds."""
    if not holds:
        raise Broken(problem)


class Contract:
    """Base class of the suites. A subclass gives the part under test by `make`, and facts about it by attributes."""

    deadline_s: ClassVar[float] = 60.0  # of each check that waits
    figures: dict[str, Any]  # name with unit -> what the check measured

    def setup_method(self) -> None:
        """Begin a check; pytest calls it."""
        self.figures = {}

    def teardown_method(self) -> None:
        """End a check, also after a failure; pytest calls it."""

    @classmethod
    def teardown_class(cls) -> None:
        """End the suite; pytest calls it."""

    def wait(self, work: Awaitable[T]) -> T:
        """Run a coroutine to its end, on an event loop of its own. Raises TimeoutError after `deadline_s`."""
        return asyncio.run(_within(work, self.deadline_s))

    @classmethod
    def perform(cls, method: str, figures: dict[str, Any]) -> None:
        """Run one check without pytest; it writes down what it measured. Raises what the check raises."""
        one = cls()
        one.setup_method()
        one.figures = figures
        try:
            getattr(one, method)()
        finally:
            one.teardown_method()

    @classmethod
    def checks(cls) -> Iterator[tuple[str, str]]:
        """Method and first line of the docstring of each check, in the order of the suite."""
        names = dict.fromkeys(name for owner in reversed(cls.__mro__) for name in vars(owner))
        for name in names:
            method = getattr(cls, name)
            if name.startswith("test_") and callable(method):
                yield name, (method.__doc__ or name).partition("\n")[0].rstrip(".")


async def _within(work: Awaitable[T], deadline_s: float) -> T:
    async with asyncio.timeout(deadline_s):
        return await work


__all__ = ["Absent", "Broken", "Contract", "require"]
