"""Rows that do not fit into one micro-batch, found while their names are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hone.data.preferences import Pair
from hone.data.sources.base import DataError


class Row(Protocol):
    """A sample, a pair of answers, or another item of supervised data."""

    @property
    def row(self) -> str: ...

    @property
    def tokens(self) -> int: ...


class RowBudget:
    """Checks rows against the token budget of a micro-batch."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def check(self, items: Sequence[Row]) -> None:
        """Raise DataError naming the first row that is too long; the two answers of a pair count together."""
        for one in items:
            if one.tokens > self._max_tokens:
                what = "the two answers with their prompt have" if isinstance(one, Pair) else "the sequence has"
                limit = self._max_tokens // 2 if isinstance(one, Pair) else self._max_tokens
                raise DataError(
                    f"{one.row}: {what} {one.tokens} tokens, more than actor.max_tokens_per_microbatch="
                    f"{self._max_tokens}, and they have to be in one micro-batch; raise that key, or set "
                    f"max_sample_tokens={limit} in the data set, which drops such rows and counts them"
                )
