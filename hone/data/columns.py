"""Columns: what in a row is the prompt, the answer, the ground truth; taken as it is, or built by a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hone.data.images import ImageError, put_images
from hone.data.settings import DatasetConfig
from hone.data.sources import DataError, Row, Rows, open_rows
from hone.registry import unknown
from hone.types import Message

STANDARD = ("prompt", "messages", "ground_truth", "data_source", "completion", "images")


class Template:
    """A Jinja2 template over a row's columns, sandboxed: an unknown column is an error, never an empty text.

    >>> Template("prompt_template", "{{ numbers | join(' ') }} =").render({"numbers": [3, 1]}, str, 0)
    '3 1 ='
    """

    def __init__(self, key: str, text: str) -> None:
        self._key = key
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{key} is not a valid Jinja2 template: {error.message} (line {error.lineno})") from error

    def render(self, row: Row, where: Callable[[int], str], index: int) -> str:
        """The text for row `index`; `where` gives the row's place in words if the template fails on it."""
        try:
            return self._template.render(row)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self._key} fails on {where(index)}: {error} (columns: {', '.join(row)})") from error


class RowReader:
    """The rows of one data set, between `skip_rows` and `max_rows`, read by meaning instead of by column name."""

    def __init__(self, name: str, config: DatasetConfig, key: str) -> None:
        """`name` is the set's name in prompt ids, `key` where its settings stand in the run file."""
        self.name = name
        self.key = key
        self.rows: Rows = open_rows(config, key)
        self._named = dict(self.rows.columns) | {str(meaning): own for meaning, own in config.columns.items()}
        self._chosen = frozenset(config.columns)
        self._system = config.system_prompt
        self._prompt = Template(f"{key}.prompt_template", config.prompt_template) if config.prompt_template else None
        self.first, self.last = self._range(config)
        self._check_names(self.row(self.first))

    def _range(self, config: DatasetConfig) -> tuple[int, int]:
        first, size = config.skip_rows, len(self.rows)
        if first >= size:
            raise DataError(f"{self.key}.skip_rows={first} leaves nothing of the {size} rows of {self.rows.place}")
        return first, size if config.max_rows is None else min(size, first + config.max_rows)

    def _check_names(self, row: Row) -> None:
        for meaning in self._chosen:
            if self._named[meaning] not in row:
                wrong = unknown(f"column of {self.rows.place}", self._named[meaning], list(row))
                raise DataError(f"{self.key}.columns.{meaning}: {wrong}")

    def __len__(self) -> int:
        return self.last - self.first

    def row(self, index: int) -> Row:
        """Row `index` of the source (not counted from `skip_rows`)."""
        return self.rows[index]

    def messages(self, row: Row, index: int) -> tuple[Message, ...]:
        """The conversation that a row opens with: its `messages`, or its prompt as one message of the user.

        Raises DataError if the row has neither, has both, or if they are not what they should be.
        """
        found: Any
        if self._prompt is not None:
            found = self._prompt.render(row, self.rows.where, index)
        else:
            found = row[self._conversation_column(row, index)]
        text = isinstance(found, str)
        conversation = (Message(role="user", content=found),) if text else self._checked(found, index)
        return self._with_system(self.illustrated(conversation, row, index))

    def illustrated(self, conversation: tuple[Message, ...], row: Row, index: int) -> tuple[Message, ...]:
        """A conversation that shows the images of the row's column `images`, if it has any."""
        sources = row.get(self.column("images"))
        if sources is None or (isinstance(sources, Sequence) and not sources):
            return conversation
        try:
            return put_images(conversation, sources)
        except ImageError as error:
            raise DataError(f"{self.rows.where(index)}: {error}") from error

    def _with_system(self, conversation: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._system and conversation[0]["role"] != "system":
            return (Message(role="system", content=self._system), *conversation)
        return conversation

    def _conversation_column(self, row: Row, index: int) -> str:
        there = [meaning for meaning in ("messages", "prompt") if row.get(self.column(meaning)) is not None]
        chosen = [meaning for meaning in there if meaning in self._chosen]
        if len(there) == 1 or len(chosen) == 1:
            return self.column((chosen or there)[0])
        if not there:
            raise DataError(
                f"{self.rows.where(index)} has no column 'prompt' or 'messages' (columns: {', '.join(row)}); "
                f"set {self.key}.prompt_template, or name one in {self.key}.columns"
            )
        raise DataError(f"{self.rows.where(index)} has both 'prompt' and 'messages': name one in {self.key}.columns")

    def required(self, row: Row, meaning: str, index: int) -> Any:
        """What a row has in the column of this meaning. Raises DataError naming the nearest column if there is none."""
        column = self.column(meaning)
        if row.get(column) is None:
            wrong = unknown("column", column, list(row)) if column not in row else f"column {column!r} is null"
            raise DataError(f"{self.rows.where(index)}: {wrong}; name the right one in {self.key}.columns.{meaning}")
        return row[column]

    def _checked(self, found: Any, index: int) -> tuple[Message, ...]:
        where = self.rows.where
        if not isinstance(found, Sequence) or not found:
            raise DataError(f"{where(index)}: the prompt should be text or a list of messages, found {found!r:.80}")
        messages: list[Message] = []
        for one in found:
            if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
                raise DataError(f"{where(index)}: a message should have a role and a content, found {one!r:.80}")
            if one.get("content") is None and not one.get("tool_calls"):
                raise DataError(f"{where(index)}: a message of role {one['role']!r} has no content")
            present = {key: value for key, value in one.items() if value is not None}  # Parquet fills gaps with null
            messages.append(Message(**present))  # type: ignore[typeddict-item]
        return tuple(messages)

    def column(self, meaning: str) -> str:
        return self._named.get(meaning, meaning)

    def missing(self, meaning: str, template: str, row: Row, index: int) -> DataError:
        """The error for a row without the column that `meaning` or `template` could have given."""
        return DataError(
            f"{self.rows.where(index)} has no column {self.column(meaning)!r} (columns: {', '.join(row)}); "
            f"set {self.key}.{template}, or name the column in {self.key}.columns"
        )


class PromptReader(RowReader):
    """Rows as prompts with what is needed to judge an answer."""

    def __init__(self, name: str, config: DatasetConfig, key: str) -> None:
        super().__init__(name, config, key)
        text = config.ground_truth_template
        self._ground_truth = Template(f"{key}.ground_truth_template", text) if text else None

    def ground_truth(self, row: Row, index: int) -> Any:
        """What the reward compares with; None if the row has nothing of the kind."""
        if self._ground_truth is not None:
            return self._ground_truth.render(row, self.rows.where, index)
        column = self.column("ground_truth")
        if "ground_truth" in self._chosen and column not in row:
            raise self.missing("ground_truth", "ground_truth_template", row, index)
        return row.get(column)

    def data_source(self, row: Row) -> str:
        """Where the row says that it comes from, else the set's name."""
        return str(row.get(self.column("data_source")) or self.name)

    def rest(self, row: Row) -> Row:
        """Every column but the standard ones, untouched."""
        images = self.column("images")
        return {column: value for column, value in row.items() if column not in STANDARD and column != images}


class SampleReader(RowReader):
    """Rows as whole conversations to learn from."""

    def __init__(self, name: str, config: DatasetConfig, key: str) -> None:
        super().__init__(name, config, key)
        text = config.answer_template
        self._answer = Template(f"{key}.answer_template", text) if text else None

    def conversation(self, row: Row, index: int) -> tuple[Message, ...]:
        """The messages, ending with (at least) one of the assistant's.

        A prompt takes its answer from `answer_template` or the column `completion` (text, or a list of messages).
        """
        messages = self.messages(row, index)
        if self._answer is not None:
            answer: Any = self._answer.render(row, self.rows.where, index)
        elif any(message["role"] == "assistant" for message in messages):
            return messages
        elif self.column("completion") in row:
            answer = row[self.column("completion")]
        else:
            raise self.missing("completion", "answer_template", row, index)
        if isinstance(answer, str):
            return (*messages, Message(role="assistant", content=answer))
        return (*messages, *self._checked(answer, index))
