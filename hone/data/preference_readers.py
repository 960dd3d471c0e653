"""Readers that turn rows into pairs, judged answers and answers in steps, and check them.

    prompt | messages   +  chosen, rejected [, margin]   -> Pair       an answer is text, or messages
    prompt | messages   +  completion, label             -> Judged     (beginning with the assistant's, or whole
    prompt | messages   +  completions, labels           -> Steps       conversations that begin alike)

A row that cannot teach anything (equal answers, an empty answer) raises an error that names the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from hone.data.columns import RowReader, SampleReader
from hone.data.images import images_in
from hone.data.messages import RenderingError
from hone.data.packing import Sample
from hone.data.preferences import Judged, Pair, Steps
from hone.data.rendering import Renderer
from hone.data.settings import DatasetConfig
from hone.data.sources.base import DataError, Row
from hone.data.stream import TooLong, sample_limit, tools_of
from hone.types import Message

R = TypeVar("R", bound=RowReader)
Conversation = tuple[Message, ...]


class PairReader(RowReader):
    """Reads rows as two whole conversations with different endings."""

    def conversations(self, row: Row, index: int) -> tuple[Conversation, Conversation]:
        """Read (chosen, rejected). Raises DataError for a row without such a pair."""
        chosen, rejected = (self._conversation(row, meaning, index) for meaning in ("chosen", "rejected"))
        if chosen == rejected:
            raise DataError(f"{self.rows.where(index)}: chosen and rejected are equal, so there is nothing to prefer")
        return chosen, rejected

    def margin(self, row: Row, index: int) -> float:
        """The row's margin; 0 if the data have no margins."""
        column = self.column("margin")
        found = row.get(column, 0.0)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise DataError(f"{self.rows.where(index)}: {column} should be a number, found {found!r:.80}")
        return float(found)

    def _conversation(self, row: Row, meaning: str, index: int) -> Conversation:
        self.required(row, meaning, index)
        found = self._parsed(row, self.column(meaning), index)
        if isinstance(found, str):
            whole: Conversation = (*self.messages(row, index), Message(role="assistant", content=found))
        else:
            given = self._checked(found, row, index, self.column(meaning))
            answers = given[0]["role"] == "assistant"
            asked = self.messages(row, index) if answers else ()
            whole = (*asked, *given) if answers else self._with_system(self.illustrated(given, row, index), row)
        if whole[-1]["role"] != "assistant":
            raise DataError(f"{self.rows.where(index)}: {meaning} should end with an answer of the assistant")
        require_text(whole[-1].get("content") or whole[-1].get("tool_calls"), meaning, self, index)
        return whole


class JudgedReader(SampleReader):
    """Reads rows as one answer and a label."""

    def good(self, row: Row, index: int) -> bool:
        return as_label(self.required(row, "label", index), self.column("label"), self, index) > 0

    def judged(self, row: Row, index: int) -> Conversation:
        """The conversation, ending with the judged answer."""
        messages = self.conversation(row, index)
        if messages[-1]["role"] != "assistant":
            raise DataError(f"{self.rows.where(index)}: the last message should be the answer that was judged")
        require_text(messages[-1].get("content") or messages[-1].get("tool_calls"), "the answer", self, index)
        return messages


class StepsReader(RowReader):
    """Reads rows as an answer in steps, each with a label."""

    def steps(self, row: Row, index: int) -> tuple[list[str], tuple[float, ...]]:
        steps, labels = self.required(row, "completions", index), self.required(row, "labels", index)
        columns = self.column("completions"), self.column("labels")
        for column, found in zip(columns, (steps, labels), strict=True):
            if isinstance(found, str) or not isinstance(found, Sequence) or not found:
                raise DataError(f"{self.rows.where(index)}: {column} should be a list, found {found!r:.80}")
        if len(steps) != len(labels):
            raise DataError(f"{self.rows.where(index)}: {len(steps)} {columns[0]} but {len(labels)} {columns[1]}")
        for number, step in enumerate(steps):
            if not isinstance(step, str):
                raise DataError(f"{self.rows.where(index)}: {columns[0]}[{number}] should be text, found {step!r:.80}")
            require_text(step, f"{columns[0]}[{number}]", self, index)
        return list(steps), tuple(as_label(label, columns[1], self, index) for label in labels)


def require_text(found: Any, what: str, reader: RowReader, index: int) -> None:
    """Raise DataError unless an answer is text or a list of parts or tool calls, and not empty."""
    if not (found.strip() if isinstance(found, str) else found):
        raise DataError(f"{reader.rows.where(index)}: {what} is empty, so there is nothing to judge")


def as_label(found: Any, column: str, reader: RowReader, index: int) -> float:
    """Convert a label to 1 (good answer, right step) or 0. Raises DataError unless it is true, false, 1 or 0."""
    if isinstance(found, bool) or (isinstance(found, int | float) and found in (0, 1)):
        return float(found)
    raise DataError(f"{reader.rows.where(index)}: {column} should be true or false (1 or 0), found {found!r:.80}")


# ------------------------------------------------------------------------------------------------------- rows to items


class _Maker(Generic[R]):
    """Base of the makers: renders a conversation, with a loss on its last answer, within the length limit."""

    reader: R

    def __init__(self, config: DatasetConfig, renderer: Renderer, key: str) -> None:
        self._renderer = renderer
        self._limit = sample_limit(config, key)

    def _where(self, index: int) -> str:
        return f"{self.reader.name}/{index}"

    def _sample(self, messages: Conversation, shared: int, row: Row, index: int) -> Sample:
        """Render a conversation, with a loss after its first `shared` messages. Raises TooLong."""
        try:
            messages = self._renderer.with_images(messages, self.reader.rows.folder(index))
            tools = tools_of(self.reader, row, index, messages, self._renderer)
            ids, mask = self._renderer.render_sample(messages, tools, first=shared)
        except RenderingError as error:
            raise DataError(f"{self.reader.rows.where(index)}: {error}") from error
        sample = Sample(ids, mask, self.reader.name, images_in(messages))
        return self._limit.fit(sample, lambda: self.reader.rows.where(index))


class PairMaker(_Maker[PairReader]):
    """Makes pairs from the rows of one set. `max_sample_tokens` limits each conversation of a pair."""

    def __init__(self, name: str, config: DatasetConfig, renderer: Renderer, key: str) -> None:
        self.reader = PairReader(name, config, key)
        super().__init__(config, renderer, key)

    def make(self, index: int) -> Pair:
        """Make the pair of a row; answers that both conversations begin with belong to the prompt. Raises TooLong."""
        reader, row = self.reader, self.reader.row(index)
        chosen, rejected = reader.conversations(row, index)
        pairs = enumerate(zip(chosen, rejected, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
        if shared in (len(chosen), len(rejected)):
            raise DataError(f"{reader.rows.where(index)}: one of chosen and rejected is the beginning of the other")
        samples = [self._sample(messages, shared, row, index) for messages in (chosen, rejected)]
        tokens = len(samples[0].token_ids)
        if samples[0].token_ids == samples[1].token_ids and self._limit.reached(tokens):
            raise TooLong(tokens, "the part of max_sample_tokens that the answers share")
        if samples[0].token_ids == samples[1].token_ids:
            raise DataError(
                f"{reader.rows.where(index)}: chosen and rejected are the same tokens once they are rendered"
            )
        return Pair(samples[0], samples[1], reader.margin(row, index), self._where(index))


class JudgedMaker(_Maker[JudgedReader]):
    """Makes single answers, good or bad, from the rows of one set."""

    def __init__(self, name: str, config: DatasetConfig, renderer: Renderer, key: str) -> None:
        self.reader = JudgedReader(name, config, key)
        super().__init__(config, renderer, key)

    def make(self, index: int) -> Judged:
        """The answer of a row. Raises TooLong."""
        reader, row = self.reader, self.reader.row(index)
        messages = reader.judged(row, index)
        return Judged(
            self._sample(messages, len(messages) - 1, row, index), reader.good(row, index), self._where(index)
        )


class StepsMaker(_Maker[StepsReader]):
    """Makes answers in steps from the rows of one set, with `separator` between two steps."""

    def __init__(self, name: str, config: DatasetConfig, renderer: Renderer, key: str, separator: str) -> None:
        self.reader = StepsReader(name, config, key)
        self._separator = separator
        super().__init__(config, renderer, key)

    def make(self, index: int) -> Steps:
        """The answer of a row. Raises TooLong."""
        reader, row = self.reader, self.reader.row(index)
        steps, labels = reader.steps(row, index)
        try:
            messages = self._renderer.with_images(reader.messages(row, index), reader.rows.folder(index))
            tools = tools_of(reader, row, index, messages, self._renderer)
            ids, mask = self._renderer.render_steps(messages, steps, self._separator, tools)
        except RenderingError as error:
            raise DataError(f"{self.reader.rows.where(index)}: {error}") from error
        sample = self._limit.fit(Sample(ids, mask, reader.name, images_in(messages)), lambda: reader.rows.where(index))
        return Steps(sample, labels[: sum(sample.loss_mask)], self._where(index))
